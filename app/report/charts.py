"""The charts of a comparison."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter
from numpy.typing import ArrayLike

from ..common.charts import INK, RUN_COLORS, render_svg

MAX_POINTS = 1_500
DASHES = ("-", (0, (5, 4)))  # the second run is dashed and drawn over the first


def loss_curves(losses: Sequence[Sequence[float]], names: Sequence[str]) -> Markup:
    """Plot the loss of each step (faint) and its running mean."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="optimizer step", ylabel="training loss (nats)")
        for values, color, dashes, width in zip(losses, RUN_COLORS, DASHES, (3.2, 1.9), strict=False):
            axes.plot(*_thin_out(values, "mean"), color=color, alpha=0.22, linewidth=0.8)
            # The exponential moving average over about the last 3 % of all steps.
            smooth = pd.Series(values).ewm(alpha=1 / max(1.0, 0.03 * len(values))).mean()
            axes.plot(*_thin_out(smooth, "mean"), color=color, linewidth=width, linestyle=dashes)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.margins(x=0.01)
        axes.set_ylim(bottom=0 if all(np.nanmin([0.0, *values]) >= 0 for values in losses) else None)

    return render_svg(320, f"Training loss of {' and '.join(names)} at each step", draw)


def loss_difference(losses: Sequence[Sequence[float]]) -> Markup:
    """Plot |loss A - loss B| at each common step at which the losses differ, on a logarithmic axis."""
    a, b = (np.asarray(values, dtype=float)[: min(map(len, losses))] for values in losses)
    identical = a.view(np.uint64) == b.view(np.uint64)
    difference = np.abs(a - b)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="optimizer step", ylabel="|difference in loss|", yscale="log")
        points = _thin_out(np.where(~identical & (difference > 0), difference, np.nan), "max")
        axes.plot(*points, color=INK, linewidth=1.1, marker="o", markersize=2)
        axes.set_title(f"bitwise identical: {identical.sum()} of {len(a)} steps", loc="left", fontsize=12.5)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        # matplotlib would write powers of ten as mathtext.
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}".replace("-", "−"))
        axes.yaxis.set_minor_formatter(NullFormatter())

    return render_svg(330, "Absolute difference in loss at each step", draw)


def _thin_out(values: ArrayLike, summary: str) -> tuple[pd.Series, pd.Series]:
    """Return steps and values, at most MAX_POINTS of each, with neighbors combined by `summary`, which skips NaN."""
    table = pd.DataFrame({"value": np.asarray(values, dtype=float)})
    table["step"] = table.index + 1.0
    groups = table.groupby(table.index * min(len(table), MAX_POINTS) // len(table))
    return groups["step"].mean(), groups["value"].agg(summary)
