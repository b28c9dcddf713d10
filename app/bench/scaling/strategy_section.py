"""The section about strategies of the scaling page: a table strategy x ranks, measured and predicted."""

from __future__ import annotations

from ...common.charts import Series
from ...common.formats import mib
from ...plan.step import Plan
from ..charts import over_ranks
from ..page import Figure, Section, Table
from ..rounds import Interval
from .comparison import COLUMNS, Comparisons, about_efficiency, cells, measured_speedup, numbers
from .configuration import MODES, ScalingPlan
from .predict import over

# Speedups at 2, 4 and 8 GPUs that a tutorial on FSDP and ZeRO reports for DDP, and for FSDP with full sharding.
PUBLISHED = {
    "ddp": {2: "1.85", 4: "3.5", 8: "6.8"},
    "zero3": {2: "1.7", 4: "3.2", 8: "6.3"},
}
COLUMNS_OF_STRATEGIES = ["strategy", "ranks", *COLUMNS, "speedup", "efficiency", "examples/s", "MiB", "published"]


def strategy_section(plan: ScalingPlan, comparisons: Comparisons, model: Plan) -> Section:
    """Return the section. `comparisons`: of all strategies, on one node."""
    parts: list[Table | Figure] = []
    for mode in MODES:
        of_mode = {key: comparison for key, comparison in comparisons.items() if key.mode == mode}
        base = next((of_one.measured for key, of_one in of_mode.items() if key.ranks == 1), None)
        rows = [
            [
                key.strategy,
                str(key.ranks),
                *cells(key, comparison),
                *measured_speedup(key, comparison.measured, base),
                f"{key.ranks * key.rows / comparison.measured.middle:.1f}",
                mib(model.largest_memory(key.strategy, key.ranks).total),
                PUBLISHED.get(key.strategy, {}).get(key.ranks, ""),
            ]
            for key, comparison in of_mode.items()
        ]
        per = f"{plan.batch} rows per step" if mode == "strong" else f"{plan.rows} rows per rank"
        parts.append(
            Table(f"{mode} scaling by strategy: {per}", COLUMNS_OF_STRATEGIES, rows, about_efficiency(of_mode, base))
        )
        if base is None:
            continue
        ratio = "speedup" if mode == "strong" else "efficiency"
        title = f"{mode} scaling by strategy: {ratio} over one rank with ddp"
        series = [Series(name, _ratios(name, of_mode, base.middle)) for name in plan.strategies]
        svg = over_ranks(title, ratio, series, ideal=float if mode == "strong" else lambda n: 1.0)
        parts.append(Figure(title, svg))
    about = [
        "Speedup and efficiency are those over one rank with ddp. MiB: what the rank that needs most holds in a step "
        "besides activations, as planned by app.plan. Published: the speedups on GPUs that a tutorial on FSDP and ZeRO "
        "reports for DDP, and for FSDP, which is zero3 here.",
        "docs/scaling.md#strategies explains the predictions.",
    ]
    return Section("strategies", "Speed by strategy", about, parts, numbers(comparisons))


def _ratios(strategy: str, comparisons: Comparisons, base: float) -> dict[int, Interval]:
    of_strategy = {key: comparison for key, comparison in comparisons.items() if key.strategy == strategy}
    return {key.ranks: over(base, comparison.measured) for key, comparison in of_strategy.items()}
