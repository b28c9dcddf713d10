"""The charts of a comparison."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter
from numpy.typing import ArrayLike, NDArray

from ..common.charts import (
    INK,
    MUTED,
    NEUTRAL,
    PAPER,
    RUN_COLORS,
    draw_ranges,
    name_rows,
    render_svg,
    show_values,
)
from ..common.errors import shorten

MAX_POINTS = 1_500
MAX_NAME_LENGTH = 40
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")  # matplotlib would write powers of ten as mathtext
DOT: dict[str, Any] = {"marker": "o", "markeredgecolor": PAPER, "markeredgewidth": 1.6}


def loss_curves(losses: Sequence[Sequence[float]], names: Sequence[str]) -> Markup:
    """Plot the loss of each step (faint) and its running mean; the second run is dashed and drawn over the first."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="optimizer step", ylabel="training loss (nats)")
        for values, color, dashes in zip(losses, RUN_COLORS, ("-", (0, (5, 4))), strict=True):
            axes.plot(*_thin_out(values, "mean"), color=color, alpha=0.22, linewidth=0.8)
            # The exponential moving average over about the last 3 % of all steps.
            smooth = pd.Series(values).ewm(alpha=1 / max(1.0, 0.03 * len(values))).mean()
            width = 3.2 if color == RUN_COLORS[0] else 1.9
            axes.plot(*_thin_out(smooth, "mean"), color=color, linewidth=width, linestyle=dashes)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.margins(x=0.01)
        axes.set_ylim(bottom=0 if all(np.nanmin([0.0, *values]) >= 0 for values in losses) else None)

    return render_svg(320, f"Training loss of {_join(names)} at each step", draw)


def loss_difference(losses: Sequence[Sequence[float]]) -> Markup:
    """Plot |loss A - loss B| at each common step on a logarithmic axis, and identical steps in a band below."""
    a, b = (np.asarray(values, dtype=float)[: min(map(len, losses))] for values in losses)
    identical = a.view(np.uint64) == b.view(np.uint64)
    difference = np.where(identical, 0.0, np.abs(a - b))

    def draw(figure: Figure) -> None:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[9, 1])
        above.set_yscale("log")
        if (difference > 0).any():
            points = _thin_out(np.where(difference > 0, difference, np.nan), "max")
            above.plot(*points, color=INK, linewidth=1.1, marker="o" if len(a) < 60 else "", markersize=3.5)
        else:
            above.set_ylim(1e-16, 1)
            above.text(0.5, 0.5, "no step differs", transform=above.transAxes, ha="center", va="center", color=MUTED)
        above.yaxis.set_major_locator(LogLocator(numticks=6))
        show_values(above.yaxis, _power_of_ten)
        above.yaxis.set_minor_formatter(NullFormatter())
        above.set_ylabel("|difference in loss|")
        above.tick_params(axis="x", which="both", length=0)
        above.spines["bottom"].set_visible(False)
        _draw_identical_band(below, identical)

    return render_svg(330, "Absolute difference in loss at each step", draw)


def _draw_identical_band(axes: Axes, identical: NDArray[np.bool_]) -> None:
    """Draw a band in both colors over the ranges of steps whose losses are bitwise identical."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], identical, [False]]).astype(np.int8)))
    ranges = [(start + 0.5, end - start) for start, end in zip(edges[::2], edges[1::2], strict=True)]
    axes.broken_barh(ranges, (0.5, 0.5), facecolor=RUN_COLORS[0])
    axes.broken_barh(ranges, (0, 0.5), facecolor=RUN_COLORS[1])
    axes.set(xlabel="optimizer step", yticks=[], ylim=(-0.2, 1.1), xlim=(0.5, len(identical) + 0.5))
    axes.grid(False)
    count = f"all {len(identical)}" if identical.all() else f"{identical.sum()} of {len(identical)}"
    axes.set_title(f"bitwise identical: {count} steps", loc="left", fontsize=12.5, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def _power_of_ten(value: float) -> str:
    return f"10{str(round(np.log10(value))).translate(SUPERSCRIPTS)}"


def accuracies(rows: Sequence[dict[str, Any]]) -> Markup:
    """Plot `estimate`, and if known `low` and `high`, of the accuracies of the two runs, and then of the baselines."""
    colors = [*RUN_COLORS, *[NEUTRAL] * (len(rows) - 2)]

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="test accuracy")
        name_rows(axes, [textwrap.fill(_shorten(row["name"]), 20) for row in rows])
        for position, (row, color) in enumerate(zip(rows, colors, strict=True)):
            estimate = row["estimate"]
            limits = (estimate, row.get("low", estimate), row.get("high", estimate))
            draw_ranges(axes, [position], [limits], horizontal=True, color=color, markersize=10, **DOT)
            above: dict[str, Any] = {"xytext": (0, 11), "textcoords": "offset points", "ha": "center"}
            axes.annotate(f"{estimate:.1%}", (estimate, position), fontweight="bold", **above)
            axes.get_yticklabels()[position].set_color(color if color in RUN_COLORS else MUTED)
        axes.set_ylim(top=-0.75)
        axes.spines["bottom"].set_visible(False)
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))

    return render_svg(72 * len(rows) + 60, "Test accuracies", draw)


def over_seeds(pairs: Sequence[dict[str, Any]], names: Sequence[str]) -> Markup:
    """Plot the accuracy of both runs with each seed, and a line at the mean over seeds."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="seed", ylabel="test accuracy")
        values = np.array([[run["accuracy"] for run in pair["runs"]] for pair in pairs])
        axes.vlines(range(len(pairs)), values.min(axis=1), values.max(axis=1), color=NEUTRAL, linewidth=1.4)
        for side, (color, marker, size) in enumerate(zip(RUN_COLORS, ("o", "D"), (11, 5.5), strict=True)):
            dashes = "-" if side == 0 else (0, (4, 3))
            axes.axhline(values[:, side].mean(), color=color, linewidth=1.2, linestyle=dashes)
            axes.plot(values[:, side], marker, color=color, markersize=size, markeredgecolor=PAPER, markeredgewidth=1)
        axes.set_xticks(range(len(pairs)), [_shorten(pair["seed"]) for pair in pairs])
        axes.set_xlim(-0.6, len(pairs) - 0.4)
        axes.margins(y=0.2)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=1))

    return render_svg(300, f"Test accuracy of {_join(names)} with each seed", draw)


def _thin_out(values: ArrayLike, summary: str) -> tuple[pd.Series, pd.Series]:
    """Return steps and values, at most MAX_POINTS of each, with neighbors combined by `summary`, which skips NaN."""
    table = pd.DataFrame({"value": np.asarray(values, dtype=float)})
    table["step"] = table.index + 1.0
    groups = table.groupby(table.index * min(len(table), MAX_POINTS) // len(table))
    return groups["step"].mean(), groups["value"].agg(summary)


def _shorten(name: object) -> str:
    return shorten(name, MAX_NAME_LENGTH)


def _join(names: Sequence[str]) -> str:
    return " and ".join(map(_shorten, names))
