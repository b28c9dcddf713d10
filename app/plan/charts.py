"""Charts of a plan: one bar per strategy, divided into parts."""

from __future__ import annotations

from dataclasses import asdict

import pandas as pd
from matplotlib.figure import Figure

from ..common.charts import draw_bars
from ..common.formats import MIB
from ..settings import STRATEGIES
from .step import Plan

SMALLEST_PART = 1e-3  # of the longest bar; smaller parts could not be seen


def draw_memory(plan: Plan) -> Figure:
    """Draw the memory of each strategy: state, activations and the rest."""
    parts = pd.DataFrame([asdict(plan.largest_memory(strategy)) for strategy in STRATEGIES])
    parts["activations"] = plan.activations.peak
    return draw_parts(parts.rename(columns=lambda name: name.replace("_", " ")), "MiB on the rank that needs most")


def draw_traffic(plan: Plan) -> Figure:
    """Draw the bytes that a rank sends under each strategy: gradients, parameters and the rest."""
    return draw_parts(pd.DataFrame([plan.sent(strategy) for strategy in STRATEGIES]), "MiB that a rank sends per step")


def draw_parts(parts: pd.DataFrame, label: str) -> Figure:
    """Draw one bar per strategy: a row of `parts`, in bytes."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.add_subplot(xlabel=label)
    visible = parts.columns[parts.max() > SMALLEST_PART * parts.sum(axis=1).max()]
    draw_bars(axes, STRATEGIES, {name: (parts[name] / MIB).tolist() for name in visible})
    axes.grid(visible=False)
    axes.spines[["top", "right"]].set_visible(False)
    if len(visible):
        figure.legend(loc="outside upper center", ncols=len(visible), frameon=False, fontsize="small")
    return figure
