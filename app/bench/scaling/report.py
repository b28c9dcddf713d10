"""Sections of the scaling page: measured next to predicted, and what the predictions are made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from ...cli import command_line
from ...common.charts import Series, points_with_ranges
from ...common.formats import format_bandwidth, format_size
from ...common.machine import describe_machine
from ..charts import format_seconds, over_ranks
from ..page import Figure, Section, Table
from ..rounds import Interval
from .cluster_section import ClusterFlags, cluster_section, measured_input
from .measure import FIT_RANKS, MODES, Configuration, Key, Round, ScalingPlan
from .predict import DISTURBED, Fits, measured_interval, over, predict, rounds_used

COLUMNS = ("rows per rank", "rounds", "measured", "range", "predicted", "interval", "error")
ABOUT_RATIOS = (
    "T(1) / T(N). T(1) is the measured median in either case: a predicted ratio divides it by the predicted T(N). "
    "Vertical lines: the interval of T(N) alone."
)

ABOUT_SUPERLINEAR = (
    "Where a measured speedup exceeds the number of ranks, the efficiency is shown as 100%: the steps of one rank were "
    "disturbed, or the smaller part of a batch fits the caches better."
)


class Comparison(NamedTuple):
    """The time of a step: measured, predicted (None for one rank), and the number of rounds that were used."""

    measured: Interval
    predicted: Interval | None
    used: str


Comparisons = Mapping[Configuration, Comparison]


def describe(plan: ScalingPlan, method: str | None) -> dict[str, str]:
    """Return facts about the machine and the job, by name. `method`: of shaping the link between two nodes, if any."""
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
    comparisons = {
        key: Comparison(
            measured_interval(key, rounds),
            predict(key, fits, cores=n_cores, threads=plan.threads) if key.ranks > 1 else None,
            rounds_used(rounds, key),
        )
        for key in rounds[0]
        if isinstance(key, Configuration)
    }
    one_node = {key: comparison for key, comparison in comparisons.items() if key.link is None}
    nodes = {key: comparison for key, comparison in comparisons.items() if key.link is not None}
    own_core = {
        key.ranks: comparison.measured
        for key, comparison in one_node.items()
        if key.mode == "weak" and key.ranks * plan.threads <= n_cores
    }
    return [
        _one_node(plan, one_node, n_cores),
        *([_two_nodes(nodes)] if nodes else []),
        _inputs(rounds, fits),
        cluster_section(measured_input(plan, fits, flags, measured=own_core), flags),
    ]


def raw_data(plan: ScalingPlan, rounds: Sequence[Round], fits: Fits, *, report: Sequence[Section]) -> dict[str, Any]:
    """Return all numbers for scaling.json."""
    return {
        "plan": asdict(plan) | {"links": [str(link) for link in plan.links]},
        "rounds": [{_name(key): asdict(result) for key, result in measured.items()} for measured in rounds],
        "fits": asdict(fits),
        "sections": {section.name: section.data for section in report},
    }


def _name(key: Key) -> str:
    if isinstance(key, int):
        return f"computation of {key} rows, {FIT_RANKS} ranks"
    return f"all-reduce, {key}" if isinstance(key, str) else str(key)


# ---- measured and predicted ------------------------------------------------------------------------------------------


def _one_node(plan: ScalingPlan, comparisons: Comparisons, n_cores: int) -> Section:
    tables, figures = [], []
    for mode in MODES:
        of_mode = {key: comparison for key, comparison in comparisons.items() if key.mode == mode}
        base = next((comparison.measured.middle for key, comparison in of_mode.items() if key.ranks == 1), None)
        rows = [
            [str(key.ranks), *_cells(key, comparison), *_ratio_cells(key, comparison, base)]
            for key, comparison in of_mode.items()
        ]
        per = f"{plan.batch} rows per step" if mode == "strong" else f"{plan.rows} rows per rank"
        above = any(float(row[-2]) > key.ranks for row, key in zip(rows, of_mode, strict=True) if row[-2])
        note = ABOUT_SUPERLINEAR if above else ""
        tables.append(Table(f"{mode} scaling: {per}", ["ranks", *COLUMNS, "speedup", "efficiency"], rows, note))
        if base is None:
            continue
        ratio = "speedup" if mode == "strong" else "efficiency"
        title = f"{mode} scaling: {ratio} over one rank"
        points = {key.ranks: over(base, comparison.measured) for key, comparison in of_mode.items()}
        model = {key.ranks: over(base, times) for key, (_, times, _) in of_mode.items() if times}
        series = [Series("measured", points), Series("predicted", model, predicted=True)]
        svg = over_ranks(title, ratio, series, ideal=float if mode == "strong" else lambda n: 1.0)
        figures.append(Figure(title, svg, ABOUT_RATIOS))
    about = (
        f"All ranks share {n_cores} CPU core(s), so more ranks than cores cannot be faster. "
        "docs/scaling.md#what-is-measured explains how times are measured and predicted."
    )
    return Section(
        "one_node", "Strong and weak scaling on this machine", [about], [*tables, *figures], _numbers(comparisons)
    )


def _two_nodes(comparisons: Comparisons) -> Section:
    rows = [[f"{key.mode}, {key.link}", *_cells(key, comparison)] for key, comparison in comparisons.items()]
    parts: list[Table | Figure] = [Table("step times", ["link", *COLUMNS], rows)]
    for mode in MODES:
        of_mode = {str(key.link): comparison for key, comparison in comparisons.items() if key.mode == mode}
        title = f"{mode} scaling: two nodes, one rank each"
        series = [
            Series("measured", {link: measured for link, (measured, _, _) in of_mode.items()}),
            Series("predicted", {link: times for link, (_, times, _) in of_mode.items() if times}, predicted=True),
        ]
        svg = points_with_ranges(title, "time of a step", series, show=format_seconds, reference=0)
        parts.append(Figure(title, svg))
    about = "The nodes are network namespaces on this machine: docs/scaling.md#the-link-between-two-nodes."
    return Section("two_nodes", "Two nodes and a shaped link", [about], parts, _numbers(comparisons))


def _cells(key: Configuration, comparison: Comparison) -> list[str]:
    """Return the cells of `COLUMNS`."""
    measured, predicted, used = comparison
    cells = [str(key.rows), used, format_seconds(measured.middle), _range(measured)]
    if predicted is None:
        return [*cells, "", "", ""]
    error = predicted.middle / measured.middle - 1
    return [*cells, format_seconds(predicted.middle), _range(predicted), f"{error:+.1%}"]


def _ratio_cells(key: Configuration, comparison: Comparison, base: float | None) -> list[str]:
    if base is None:
        return ["", ""]
    speedup = base / comparison.measured.middle * (key.ranks if key.mode == "weak" else 1)
    return [f"{speedup:.2f}", f"{min(1.0, speedup / key.ranks):.0%}"]


def _range(times: Interval) -> str:
    return f"{format_seconds(times.low)} to {format_seconds(times.high)}"


def _numbers(comparisons: Comparisons) -> dict[str, Any]:
    return {
        str(key): {
            "ranks": key.ranks,
            "rows_per_rank": key.rows,
            "measured": comparison.measured._asdict(),
            "predicted": comparison.predicted and comparison.predicted._asdict(),
        }
        for key, comparison in comparisons.items()
    }


# ---- inputs ----------------------------------------------------------------------------------------------------------


def _inputs(rounds: Sequence[Round], fits: Fits) -> Section:
    buckets = next(iter(fits.computation.values())).buckets
    times = [
        [str(rows), rounds_used(rounds, rows), *map(format_seconds, [work.seconds, *(at for _, at in work.buckets)])]
        for rows, work in fits.computation.items()
    ]
    local_rounds, link_rounds = rounds_used(rounds, "local"), rounds_used(rounds, "link") if fits.link else ""
    lines = [
        ("one node", local_rounds, fits.local),
        ("one node, CPU time per rank", local_rounds, fits.local_cpu),
        ("two nodes, unshaped link", link_rounds, fits.link),
        ("two nodes, CPU time per rank", link_rounds, fits.link_cpu),
    ]
    exchanges = [
        [name, used, format_seconds(line.alpha), format_bandwidth(line.beta), f"{line.relative_error:.0%}"]
        for name, used, line in lines
        if line is not None
    ]
    shared = (
        f"Measured with more threads than cores: times, except for CPU time and the link, are divided by "
        f"{fits.slowdown:g}, to be those with a core for each thread."
        if fits.slowdown > 1
        else ""
    )
    measurements = [measurement for measured in rounds for measurement in measured.values()]
    disturbed = sum(measurement.others > DISTURBED for measurement in measurements)
    about = (
        f"In {disturbed} of {len(measurements)} measurements, other processes used more than {DISTURBED:.0%} of the "
        "CPU time. They are left out if that leaves other rounds; the column “rounds” shows how many were used."
    )
    header = ["rows per rank", "rounds", "step", *(f"bucket of {format_size(size)} ready" for size, _ in buckets)]
    tables = [
        Table("computation of a step without exchanges, two ranks at once", header, times, shared),
        Table(
            "all-reduce among two ranks: α + β x bytes", ["", "rounds", "α", "1 / β", "median error"], exchanges, shared
        ),
    ]
    data = {"disturbed": disturbed, "measurements": len(measurements)}
    return Section("inputs", "What the predictions are made from", [about], tables, data)
