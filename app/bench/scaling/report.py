"""Sections of the scaling page: measured next to predicted, and what the predictions are made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from ...cli import command_line
from ...common.charts import Series, points_with_ranges
from ...common.formats import format_bandwidth, format_size
from ...common.machine import describe_machine
from ...plan.step import Plan
from ..charts import format_seconds, over_ranks
from ..page import Figure, Section, Table
from ..rounds import Interval
from .cluster_section import ClusterFlags, cluster_section, measured_input
from .comparison import COLUMNS, Comparison, Comparisons, about_efficiency, cells, measured_speedup, numbers
from .configuration import MODES, Alone, Configuration, ScalingPlan
from .measure import Key, Round
from .predict import DISTURBED, Fits, measured_interval, over, predict, rounds_used
from .strategies import predict_strategy
from .strategy_section import strategy_section

ABOUT_RATIOS = (
    "T(1) / T(N). T(1) is the measured median in either case: a predicted ratio divides it by the predicted T(N). "
    "Vertical lines: the interval of T(N) alone."
)


def describe(plan: ScalingPlan, method: str | None) -> dict[str, str]:
    """Return facts about the machine and the job, by name. `method`: of shaping the link between two nodes, if any."""
    return {
        "model": f"{plan.model}, {plan.length} tokens per row",
        "threads": f"{plan.threads} per rank",
        "link": method or "none",
        "rounds": f"{plan.rounds} of {plan.steps} steps",
        **describe_machine(torch.device("cuda", 0) if plan.gpus else torch.device("cpu")),
        "command": command_line(),
    }


def sections(
    plan: ScalingPlan,
    rounds: Sequence[Round],
    fits: Fits,
    *,
    flags: ClusterFlags,
    model: Plan | None = None,
) -> list[Section]:
    """Return all sections. `model`: the plan of its training step, for strategies other than `ddp`."""

    def predicted(key: Configuration) -> Interval:
        if model is None:
            return predict(key, fits, cores=plan.n_cores, threads=plan.threads)
        return predict_strategy(key, fits, model, cores=plan.n_cores, threads=plan.threads)

    comparisons = {
        key: Comparison(
            measured_interval(key, rounds),
            predicted(key) if key.ranks > 1 else None,
            rounds_used(rounds, key),
        )
        for key in rounds[0]
        if isinstance(key, Configuration)
    }
    all_strategies = {key: comparison for key, comparison in comparisons.items() if key.link is None}
    one_node = {key: comparison for key, comparison in all_strategies.items() if key.strategy == "ddp"}
    nodes = {key: comparison for key, comparison in comparisons.items() if key.link is not None}
    own_core = {
        key.ranks: comparison.measured
        for key, comparison in one_node.items()
        if key.mode == "weak" and key.ranks * plan.threads <= plan.n_cores
    }
    return [
        _one_node(plan, one_node),
        *([strategy_section(plan, all_strategies, model)] if model else []),
        *([_two_nodes(nodes)] if nodes else []),
        _inputs(rounds, fits),
        cluster_section(measured_input(plan, fits, flags, measured=own_core), flags),
    ]


def raw_data(plan: ScalingPlan, rounds: Sequence[Round], fits: Fits, *, report: Sequence[Section]) -> dict[str, Any]:
    """Return all numbers for scaling.json."""
    return {
        "plan": asdict(plan) | {"links": [str(link) for link in plan.links]},
        "rounds": [{_name(key): asdict(result) for key, result in measured.items()} for measured in rounds],
        "fits": {
            **asdict(replace(fits, computation={})),
            "computation": {_computation_name(key): asdict(work) for key, work in fits.computation.items()},
        },
        "sections": {section.name: section.data for section in report},
    }


def _computation_name(key: Alone) -> str:
    return str(key.rows) if key.strategy == "ddp" else f"{key.strategy}, {key.rows}"


def _name(key: Key) -> str:
    return f"all-reduce, {key}" if key in ("local", "link") else str(key)


# ---- measured and predicted ------------------------------------------------------------------------------------------


def _one_node(plan: ScalingPlan, comparisons: Comparisons) -> Section:
    tables, figures = [], []
    for mode in MODES:
        of_mode = {key: comparison for key, comparison in comparisons.items() if key.mode == mode}
        base = next((comparison.measured for key, comparison in of_mode.items() if key.ranks == 1), None)
        rows = [
            [str(key.ranks), *cells(key, comparison), *measured_speedup(key, comparison.measured, base)]
            for key, comparison in of_mode.items()
        ]
        per = f"{plan.batch} rows per step" if mode == "strong" else f"{plan.rows} rows per rank"
        note = about_efficiency(of_mode, base)
        tables.append(Table(f"{mode} scaling: {per}", ["ranks", *COLUMNS, "speedup", "efficiency"], rows, note))
        if base is None:
            continue
        ratio = "speedup" if mode == "strong" else "efficiency"
        title = f"{mode} scaling: {ratio} over one rank"
        points = {key.ranks: over(base.middle, comparison.measured) for key, comparison in of_mode.items()}
        model = {key.ranks: over(base.middle, times) for key, (_, times, _) in of_mode.items() if times}
        series = [Series("measured", points), Series("predicted", model, predicted=True)]
        svg = over_ranks(title, ratio, series, ideal=float if mode == "strong" else lambda n: 1.0)
        figures.append(Figure(title, svg, ABOUT_RATIOS))
    shared = f"All ranks share {plan.n_cores} CPU core(s), so more ranks than cores cannot be faster."
    about = ["Each rank has a GPU." if plan.gpus else shared]
    about += ["docs/scaling.md#what-is-measured explains how times are measured and predicted."]
    return Section(
        "one_node",
        "Strong and weak scaling on this machine",
        [" ".join(about)],
        [*tables, *figures],
        numbers(comparisons),
    )


def _two_nodes(comparisons: Comparisons) -> Section:
    rows = [[f"{key.mode}, {key.link}", *cells(key, comparison)] for key, comparison in comparisons.items()]
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
    return Section("two_nodes", "Two nodes and a shaped link", [about], parts, numbers(comparisons))


# ---- inputs ----------------------------------------------------------------------------------------------------------


def _inputs(rounds: Sequence[Round], fits: Fits) -> Section:
    buckets = next(iter(fits.by_rows().values())).buckets
    times = [
        [
            str(rows),
            rounds_used(rounds, Alone(rows)),
            *map(format_seconds, [work.seconds, *(at for _, at in work.buckets)]),
        ]
        for rows, work in fits.by_rows().items()
    ]
    local_rounds, link_rounds = rounds_used(rounds, "local"), rounds_used(rounds, "link") if fits.link else ""
    lines = [
        ("one node", local_rounds, fits.local),
        ("one node, CPU time per rank", local_rounds, fits.local_cpu),
        ("two nodes, unshaped link", link_rounds, fits.link),
        ("two nodes, CPU time per rank", link_rounds, fits.link_cpu),
        *((f"{name}, one node", rounds_used(rounds, name), line) for name, line in fits.collectives.items()),
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
            "collectives among two ranks: α + β x bytes (an all-reduce if not named)",
            ["", "rounds", "α", "1 / β", "median error"],
            exchanges,
            shared,
        ),
    ]
    sharded = [
        [key.strategy, str(key.rows), rounds_used(rounds, key), format_seconds(work.seconds)]
        for key, work in fits.computation.items()
        if key.strategy != "ddp"
    ]
    if sharded:
        header = ["strategy", "rows per rank", "rounds", "step"]
        tables.insert(1, Table("the same under other strategies", header, sharded, shared))
    data = {"disturbed": disturbed, "measurements": len(measurements)}
    return Section("inputs", "What the predictions are made from", [about], tables, data)
