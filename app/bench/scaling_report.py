"""Sections of the scaling page: measured next to predicted, and what the predictions are made from."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

import torch

from app.bench import scaling_charts as charts
from app.bench.charts import format_seconds, format_size
from app.bench.cluster_report import ClusterFlags, cluster_section
from app.bench.page import Figure, Section, Table
from app.bench.scaling_measure import FIT_RANKS, MODES, Configuration, Plan, Round, cores
from app.bench.scaling_predict import DISTURBED, Fits, Interval, measured_interval, over, predict
from app.hardware import git_commit


def describe(plan: Plan, method: str | None) -> dict[str, str]:
    """Return facts about the machine and the job, by name.

    Args:
        method: how the link between two nodes is shaped; None: there are no nodes.
    """
    return {
        "model": f"{plan.size}, {plan.length} tokens per row",
        "machine": f"{platform.machine()}, {cores()} CPU cores, {plan.threads} thread(s) per rank",
        "link": method or "none",
        "rounds": f"{plan.rounds} of {plan.steps} steps",
        "PyTorch": torch.__version__,
        "commit": git_commit() or "unknown",
        "date": f"{datetime.now():%Y-%m-%d %H:%M}",
    }


def sections(plan: Plan, rounds: Sequence[Round], fits: Fits, flags: ClusterFlags, n_cores: int) -> list[Section]:
    """Return the sections of the page."""
    measured = {key: measured_interval(key, rounds) for key in rounds[0] if isinstance(key, Configuration)}
    predicted = {key: predict(key, fits, n_cores, plan.threads) for key in measured if key.ranks > 1}
    parts = [_one_node(plan, measured, predicted, n_cores)]
    if any(key.link is not None for key in measured):
        parts.append(_two_nodes(measured, predicted))
    own_core = {
        key.ranks: one
        for key, one in measured.items()
        if key.mode == "weak" and key.link is None and key.ranks * plan.threads <= n_cores
    }
    return [*parts, _inputs(rounds, fits), cluster_section(plan, fits, flags, own_core)]


def raw_data(plan: Plan, rounds: Sequence[Round], fits: Fits, report: Sequence[Section]) -> dict[str, Any]:
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
    plan: Plan, measured: Mapping[Configuration, Interval], predicted: Mapping[Configuration, Interval], n_cores: int
) -> Section:
    tables, figures = [], []
    for mode in MODES:
        keys = [key for key in measured if key.mode == mode and key.link is None]
        rows = f"{plan.batch} rows per step" if mode == "strong" else f"{plan.rows} rows per rank"
        base = next((measured[key].middle for key in keys if key.ranks == 1), None)
        header = [
            "ranks",
            "rows per rank",
            "measured",
            "range",
            "predicted",
            "interval",
            "error",
            "speedup",
            "efficiency",
        ]
        tables.append(Table(f"{mode} scaling: {rows}", header, [_row(key, measured, predicted, base) for key in keys]))
        if base is None:
            continue
        figure = "speedup" if mode == "strong" else "efficiency"
        points, model = (
            {key.ranks: over(base, source[key]) for key in keys if key in source} for source in (measured, predicted)
        )
        title = f"{mode} scaling: {figure} over one rank"
        svg = charts.over_ranks(title, figure, points, model, ideal=float if mode == "strong" else lambda n: 1.0)
        figures.append(Figure(title, svg, "Vertical lines: intervals."))
    return Section(
        "one_node",
        "Strong and weak scaling on this machine",
        [
            f"All ranks share {n_cores} CPU core(s), so more ranks than cores can't be faster. Only what two ranks do "
            "alone, computing or exchanging, is an input of the predictions; no step time is.",
            "Measured: the median of the rounds and their range. Predicted: the model's time, and its interval from "
            "the fastest and slowest computation and the 95% prediction interval of the exchanges.",
        ],
        [*tables, *figures],
        _comparison(measured, predicted, with_link=False),
    )


def _row(
    key: Configuration,
    measured: Mapping[Configuration, Interval],
    predicted: Mapping[Configuration, Interval],
    base: float | None,
) -> list[str]:
    one = measured[key]
    row = [str(key.ranks), str(key.rows), format_seconds(one.middle), _range(one)]
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


def _two_nodes(measured: Mapping[Configuration, Interval], predicted: Mapping[Configuration, Interval]) -> Section:
    keys = [key for key in predicted if key.link is not None]
    rows = [
        [
            f"{key.mode}, {key.link}",
            str(key.rows),
            format_seconds(measured[key].middle),
            _range(measured[key]),
            format_seconds(predicted[key].middle),
            _range(predicted[key]),
            f"{predicted[key].middle / measured[key].middle - 1:+.1%}",
        ]
        for key in keys
    ]
    header = ["link", "rows per rank", "measured", "range", "predicted", "interval", "error"]
    parts: list[Table | Figure] = [Table("step times", header, rows)]
    for mode in MODES:
        of_mode = [key for key in keys if key.mode == mode]
        title = f"{mode} scaling: two nodes, one rank each"
        intervals = [[source[key] for key in of_mode] for source in (measured, predicted)]
        svg = charts.side_by_side(title, [str(key.link) for key in of_mode], *intervals)
        parts.append(Figure(title, svg))
    return Section(
        "two_nodes",
        "Two nodes and a shaped link",
        [
            "The nodes are network namespaces on this machine. All links are unseen: the predictions know the rate and "
            "the delay of a link, and all-reduces over the same link without shaping.",
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
            "measured": asdict(one),
            "predicted": asdict(predicted[key]) if key in predicted else None,
        }
        for key, one in measured.items()
        if (key.link is not None) == with_link
    }


# ---- inputs ----------------------------------------------------------------------------------------------------------


def _inputs(rounds: Sequence[Round], fits: Fits) -> Section:
    buckets = next(iter(fits.computation.values())).buckets
    computation = [
        [str(rows), format_seconds(one.seconds), *(format_seconds(at) for _, at in one.buckets)]
        for rows, one in fits.computation.items()
    ]
    header = ["rows per rank", "step", *(f"bucket of {format_size(size)} ready" for size, _ in buckets)]
    lines = {
        "one node": fits.local,
        "one node, CPU time per rank": fits.local_cpu,
        "two nodes, unshaped link": fits.link,
        "two nodes, CPU time per rank": fits.link_cpu,
    }
    rows = [
        [name, format_seconds(one.alpha), f"{1 / one.beta / 1e9:.2f} GB/s", f"{one.relative_error:.0%}"]
        for name, one in lines.items()
        if one is not None
    ]
    everything = [one for measured in rounds for one in measured.values()]
    disturbed = sum(one.others > DISTURBED for one in everything)
    return Section(
        "inputs",
        "What the predictions are made from",
        [
            f"In {disturbed} of {len(everything)} measurements, other processes used more than {DISTURBED:.0%} of the "
            "CPU time. They are left out where an undisturbed round remains.",
        ],
        [
            Table("computation of a step without exchanges, two ranks at once", header, computation),
            Table("all-reduce among two ranks: α + β x bytes", ["", "α", "1 / β", "median error"], rows),
        ],
        {"disturbed": disturbed, "measurements": len(everything)},
    )
