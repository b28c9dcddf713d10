"""Charts of a plan: one bar per strategy, divided into parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from matplotlib.figure import Figure

from ..common.charts import draw_bars
from ..common.formats import MIB
from ..settings import STRATEGIES
from .memory import RankMemory
from .step import Plan

SMALLEST_PART = 1e-3  # of the longest bar


def draw_memory(plan: Plan) -> Figure:
    """Draw the memory of each strategy: state, activations and the rest."""
    memories = [plan.largest_memory(strategy) for strategy in STRATEGIES]
    names = [field.name for field in fields(RankMemory)]
    parts = {name.replace("_", " "): [float(getattr(memory, name)) for memory in memories] for name in names}
    parts["activations"] = [float(plan.activations.peak)] * len(STRATEGIES)
    return draw_parts(parts, "MiB on the rank that needs most")


def draw_traffic(plan: Plan) -> Figure:
    """Draw what a rank sends under each strategy: gradients, parameters and the rest."""
    sent = [plan.sent(strategy) for strategy in STRATEGIES]
    return draw_parts(
        {purpose: [one[purpose] for one in sent] for purpose in sent[0]}, "MiB that a rank sends per step"
    )


def draw_parts(parts: Mapping[str, Sequence[float]], label: str) -> Figure:
    """Draw one bar per strategy.

    Args:
        parts: the bytes of each part, for each strategy. Parts that would be too small to see are left out.
        label: of the axis.
    """
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.add_subplot(xlabel=label)
    longest = max(map(sum, zip(*parts.values(), strict=True)))
    shown = {name: sizes for name, sizes in parts.items() if max(sizes) > SMALLEST_PART * longest}
    draw_bars(axes, STRATEGIES, {name: [size / MIB for size in sizes] for name, sizes in shown.items()})
    axes.grid(visible=False)
    axes.spines[["top", "right"]].set_visible(False)
    if shown:
        figure.legend(loc="outside upper center", ncols=len(shown), frameon=False, fontsize="small")
    return figure
