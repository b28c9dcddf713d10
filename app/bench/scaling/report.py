"""Sections of the scaling page: measured next to predicted, and what the predictions are made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ...cli import command_line
from ...common.charts import Series, points_with_ranges
from ...common.formats import format_bandwidth, format_size
from ...common.machine import describe_machine
from ..alpha_beta import AlphaBeta
from ..charts import format_seconds, over_ranks
from ..page import Figure, Section, Table
from ..rounds import Interval
from .cluster_report import ClusterFlags, cluster_section
from .measure import FIT_RANKS, MODES, Configuration, Key, Round, ScalingPlan
from .predict import DISTURBED, Fits, measured_interval, over, predict, rounds_used

ABOUT_RATIOS = (
    "T(1) / T(N). T(1) is the measured median in either case: a predicted ratio divides it by the predicted T(N). "
    "Vertical lines: the interval of T(N) alone."
)


def describe(plan: ScalingPlan, method: str | None) -> dict[str, str]:
    """Return facts about the machine and the job, by name.

    Args:
        method: how the link between two nodes is shaped; None: there are no nodes.
    """
    return {
        "model": f"{plan.size}, {plan.length} tokens per row",
        "threads": f"{plan.threads} per rank",
        "link": method or "none",
        "rounds": f"{plan.rounds} of {plan.steps} steps",
        **describe_machine(torch.device("cpu")),
        "command": command_line(),
    }


def sections(
    plan: ScalingPlan, rounds: Sequence[Round], fits: Fits, *, flags: ClusterFlags, n_cores: int
) -> list[Section]:
    """Return the sections of the page."""
    measured = {key: measured_interval(key, rounds) for key in rounds[0] if isinstance(key, Configuration)}
    predicted = {key: predict(key, fits, cores=n_cores, threads=plan.threads) for key in measured if key.ranks > 1}
    used = {key: rounds_used(rounds, key) for key in rounds[0]}
    parts = [_one_node(plan, measured, predicted, used=used, n_cores=n_cores)]
    if any(key.link is not None for key in measured):
        parts.append(_two_nodes(measured, predicted, used))
    own_core = {
        key.ranks: one
        for key, one in measured.items()
        if key.mode == "weak" and key.link is None and key.ranks * plan.threads <= n_cores
    }
    return [*parts, _inputs(rounds, fits, used), cluster_section(plan, fits, flags, measured=own_core)]


def raw_data(plan: ScalingPlan, rounds: Sequence[Round], fits: Fits, *, report: Sequence[Section]) -> dict[str, Any]:
    """Return all numbers for scaling.json."""
    return {
        "plan": asdict(plan) | {"links": [str(link) for link in plan.links]},
        "rounds": [{_name(key): asdict(one) for key, one in measured.items()} for measured in rounds],
        "fits": asdict(fits),
        "sections": {section.name: section.data for section in report},
    }


def _name(key: object) -> str:
    if isinstance(key, int):
        return f"computation of {key} rows, {FIT_RANKS} ranks"
    return f"all-reduce, {key}" if isinstance(key, str) else str(key)


# ---- measured and predicted ------------------------------------------------------------------------------------------


def _one_node(
    plan: ScalingPlan,
    measured: Mapping[Configuration, Interval],
    predicted: Mapping[Configuration, Interval],
    *,
    used: Mapping[Key, str],
    n_cores: int,
) -> Section:
    tables, figures = [], []
    for mode in MODES:
        keys = [key for key in measured if key.mode == mode and key.link is None]
        rows = f"{plan.batch} rows per step" if mode == "strong" else f"{plan.rows} rows per rank"
        base = next((measured[key].middle for key in keys if key.ranks == 1), None)
        header = [
            "ranks",
            "rows per rank",
            "rounds",
            "measured",
            "range",
            "predicted",
            "interval",
            "error",
            "speedup",
            "efficiency",
        ]
        tables.append(
            Table(
                f"{mode} scaling: {rows}",
                header,
                [_row(key, measured, predicted, used=used[key], base=base) for key in keys],
            )
        )
        if base is None:
            continue
        figure = "speedup" if mode == "strong" else "efficiency"
        points, model = (
            {key.ranks: over(base, source[key]) for key in keys if key in source} for source in (measured, predicted)
        )
        title = f"{mode} scaling: {figure} over one rank"
        series = [Series("measured", points), Series("predicted", model, predicted=True)]
        svg = over_ranks(title, figure, series, ideal=float if mode == "strong" else lambda n: 1.0)
        figures.append(Figure(title, svg, ABOUT_RATIOS))
    return Section(
        "one_node",
        "Strong and weak scaling on this machine",
        [
            f"All ranks share {n_cores} CPU core(s), so more ranks than cores can't be faster. "
            "docs/scaling.md#what-is-measured explains how times are measured and predicted.",
        ],
        [*tables, *figures],
        _comparison(measured, predicted, with_link=False),
    )


def _row(
    key: Configuration,
    measured: Mapping[Configuration, Interval],
    predicted: Mapping[Configuration, Interval],
    *,
    used: str,
    base: float | None,
) -> list[str]:
    one = measured[key]
    row = [str(key.ranks), str(key.rows), used, format_seconds(one.middle), _range(one)]
    if key in predicted:
        two = predicted[key]
        row += [format_seconds(two.middle), _range(two), f"{two.middle / one.middle - 1:+.1%}"]
    else:
        row += ["", "", ""]
    if base is None:
        return [*row, "", ""]
    speedup = base / one.middle * (key.ranks if key.mode == "weak" else 1)
    return [*row, f"{speedup:.2f}", f"{speedup / key.ranks:.0%}"]


def _range(one: Interval) -> str:
    return f"{format_seconds(one.low)} to {format_seconds(one.high)}"


def _two_nodes(
    measured: Mapping[Configuration, Interval], predicted: Mapping[Configuration, Interval], used: Mapping[Key, str]
) -> Section:
    keys = [key for key in predicted if key.link is not None]
    rows = [
        [
            f"{key.mode}, {key.link}",
            str(key.rows),
            used[key],
            format_seconds(measured[key].middle),
            _range(measured[key]),
            format_seconds(predicted[key].middle),
            _range(predicted[key]),
            f"{predicted[key].middle / measured[key].middle - 1:+.1%}",
        ]
        for key in keys
    ]
    header = ["link", "rows per rank", "rounds", "measured", "range", "predicted", "interval", "error"]
    parts: list[Table | Figure] = [Table("step times", header, rows)]
    for mode in MODES:
        of_mode = [key for key in keys if key.mode == mode]
        title = f"{mode} scaling: two nodes, one rank each"
        series = [
            Series(name, {str(key.link): source[key] for key in of_mode}, predicted=source is predicted)
            for name, source in (("measured", measured), ("predicted", predicted))
        ]
        parts.append(
            Figure(title, points_with_ranges(title, "time of a step", series, show=format_seconds, reference=0))
        )
    return Section(
        "two_nodes",
        "Two nodes and a shaped link",
        [
            "The nodes are network namespaces on this machine: docs/scaling.md#the-link-between-two-nodes.",
        ],
        parts,
        _comparison(measured, predicted, with_link=True),
    )


def _comparison(
    measured: Mapping[Configuration, Interval], predicted: Mapping[Configuration, Interval], with_link: bool
) -> dict[str, Any]:
    return {
        str(key): {
            "ranks": key.ranks,
            "rows_per_rank": key.rows,
            "measured": one._asdict(),
            "predicted": predicted[key]._asdict() if key in predicted else None,
        }
        for key, one in measured.items()
        if (key.link is not None) == with_link
    }


# ---- inputs ----------------------------------------------------------------------------------------------------------


def _inputs(rounds: Sequence[Round], fits: Fits, used: Mapping[Key, str]) -> Section:
    buckets = next(iter(fits.computation.values())).buckets
    computation = [
        [str(rows), used[rows], format_seconds(one.seconds), *(format_seconds(at) for _, at in one.buckets)]
        for rows, one in fits.computation.items()
    ]
    header = ["rows per rank", "rounds", "step", *(f"bucket of {format_size(size)} ready" for size, _ in buckets)]
    lines: list[tuple[str, Key, AlphaBeta | None]] = [
        ("one node", "local", fits.local),
        ("one node, CPU time per rank", "local", fits.local_cpu),
        ("two nodes, unshaped link", "link", fits.link),
        ("two nodes, CPU time per rank", "link", fits.link_cpu),
    ]
    exchanges = [
        [name, used[key], format_seconds(one.alpha), format_bandwidth(one.beta), f"{one.relative_error:.0%}"]
        for name, key, one in lines
        if one is not None
    ]
    shared = (
        f"Measured with more threads than cores: times, except for CPU time and the link, are divided by "
        f"{fits.slowdown:g}, to be those with a core for each thread."
        if fits.slowdown > 1
        else ""
    )
    header_of_exchanges = ["", "rounds", "α", "1 / β", "median error"]
    everything = [one for measured in rounds for one in measured.values()]
    disturbed = sum(one.others > DISTURBED for one in everything)
    return Section(
        "inputs",
        "What the predictions are made from",
        [
            f"In {disturbed} of {len(everything)} measurements, other processes used more than {DISTURBED:.0%} of the "
            "CPU time. They are left out if that leaves other rounds; the column “rounds” shows how many were used.",
        ],
        [
            Table("computation of a step without exchanges, two ranks at once", header, computation, shared),
            Table("all-reduce among two ranks: α + β x bytes", header_of_exchanges, exchanges, shared),
        ],
        {"disturbed": disturbed, "measurements": len(everything)},
    )
