"""Charts of the communication laboratory: SVG to embed in its page, drawn as those of `app.report.plots`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from app.bench.alpha_beta import AlphaBeta
from app.report.plots import NEUTRAL, SERIES_COLORS, render_svg

KIB = 2**10
DASHES = ("-", (0, (4, 2)))
MARKERS = "osD^vPXd"


def format_size(size: float) -> str:
    """Return a number of bytes with a binary unit, such as 64 KiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < KIB:
            break
        size /= KIB
        last = unit
    else:
        unit = last
    return f"{size:.3g} {unit}"


def format_seconds(seconds: float) -> str:
    """Return a time with three digits and a unit, such as 52.1 µs."""
    for limit, unit in ((1e-3, "µs"), (1, "ms")):
        if seconds < limit:
            return f"{seconds / limit * 1000:.3g} {unit}"
    return f"{seconds:.3g} s"


def time_by_size(name: str, sizes: Sequence[float], seconds: Sequence[float], fit: AlphaBeta) -> Markup:
    """Plot measured times over sizes, the fitted line and its 95% prediction interval, on logarithmic axes."""
    grid = np.geomspace(min(sizes), max(sizes), 60)
    low, high = zip(*(fit.prediction_interval(size) for size in grid), strict=True)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="size of the complete tensor", ylabel="time")
        bottom = 0.5 * min(seconds)
        axes.fill_between(grid, np.maximum(low, bottom), high, color=NEUTRAL, alpha=0.2, linewidth=0)
        axes.plot(grid, [fit.seconds(size) for size in grid], color=NEUTRAL, linewidth=1.6)
        axes.plot(sizes, seconds, "o", color=SERIES_COLORS[0], markersize=6)
        use_logarithmic_axes(axes)
        axes.set_ylim(bottom=bottom)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))

    return render_svg(300, f"Time of {name} over the size of the tensor", draw)


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
        use_logarithmic_axes(axes)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        figure.legend(loc="outside lower center", ncols=2, fontsize=11)

    return render_svg(330 + 10 * len(bandwidths), "Bus bandwidth over the size of the tensor", draw)


def use_logarithmic_axes(axes: Axes) -> None:
    """Make both axes logarithmic, with powers of 16 as sizes on the x axis."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=16, numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_size(value)))
    axes.yaxis.set_major_locator(LogLocator(numticks=8))
    axes.yaxis.set_minor_formatter(NullFormatter())
