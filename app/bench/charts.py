"""Charts of the communication laboratory: SVG to embed in its page, drawn as those of `app.report.charts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from ..common.formats import format_size, three_digits
from ..report.charts import SERIES_COLORS, render_svg
from .alpha_beta import AlphaBeta

DASHES = ("-", (0, (4, 2)))
MARKERS = "osD^vPXd"


def format_seconds(seconds: float) -> str:
    """Return a time with three digits and a unit, such as 52.1 µs."""
    rounded = three_digits(seconds)
    if rounded < 1e-3:
        return f"{1e6 * rounded:g} µs"
    return f"{1e3 * rounded:g} ms" if rounded < 1 else f"{rounded:g} s"


@dataclass(frozen=True)
class Line:
    """Measured times, in seconds, of tensors of several sizes, in bytes, and the line that fits them."""

    name: str
    sizes: Sequence[float]
    seconds: Sequence[float]
    fit: AlphaBeta


def time_by_size(lines: Sequence[Line], limits: tuple[float, float]) -> Markup:
    """Plot measured times over sizes, the fitted lines and their 95% prediction intervals, on logarithmic axes.

    Args:
        lines: at most one per color.
        limits: of the y axis, in seconds, so that several charts can be compared.
    """

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="size of the complete tensor", ylabel="time")
        for line, color, marker in zip(lines, SERIES_COLORS, MARKERS, strict=False):
            grid = np.geomspace(min(line.sizes), max(line.sizes), 60)
            low, high = zip(*(line.fit.prediction_interval(size) for size in grid), strict=True)
            # An interval may begin at zero, which a logarithmic axis does not have.
            axes.fill_between(grid, np.maximum(low, limits[0]), high, color=color, alpha=0.14, linewidth=0)
            axes.plot(grid, [line.fit.seconds(size) for size in grid], color=color, linewidth=1.4)
            axes.plot(line.sizes, line.seconds, marker, color=color, markersize=6, label=line.name)
        use_logarithmic_axes(axes, limits)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))
        if len(lines) > 1:
            axes.legend(loc="upper left", fontsize=11)

    return render_svg(300, f"Time of {lines[0].name} over the size of the tensor", draw)


def bandwidth_by_size(bandwidths: Mapping[str, Sequence[tuple[float, float]]]) -> Markup:
    """Plot (size, bytes per second) of several collectives on logarithmic axes."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="size of the complete tensor", ylabel="bus bandwidth, GB/s")
        for i, (name, points) in enumerate(bandwidths.items()):
            sizes, values = zip(*points, strict=True)
            again, color = divmod(i, len(SERIES_COLORS))
            axes.plot(
                sizes,
                [value / 1e9 for value in values],
                color=SERIES_COLORS[color],
                linestyle=DASHES[again % 2],
                marker=MARKERS[color],
                markersize=5,
                linewidth=1.6,
                label=name,
            )
        all_values = [value / 1e9 for points in bandwidths.values() for _, value in points]
        use_logarithmic_axes(axes, limits_of(all_values))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        figure.legend(loc="outside lower center", ncols=2, fontsize=11)

    return render_svg(330 + 10 * len(bandwidths), "Bus bandwidth over the size of the tensor", draw)


def limits_of(values: Sequence[float]) -> tuple[float, float]:
    """Return limits of a logarithmic axis that leave some room around values."""
    return 0.6 * min(values), 1.6 * max(values)


def use_logarithmic_axes(axes: Axes, limits: tuple[float, float]) -> None:
    """Make both axes logarithmic: sizes in steps of a factor of 16 on the x axis, and `limits` on the y axis."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=16, numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_size(value)))
    axes.set_ylim(*limits)
    few_decades = limits[1] < 100 * limits[0]
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few_decades else (1,), numticks=8))
    axes.yaxis.set_minor_locator(NullLocator())
