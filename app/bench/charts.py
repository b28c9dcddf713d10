"""Charts of the laboratories over the size of a tensor and over the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from ..common.charts import (
    MARKERS,
    NEUTRAL,
    SERIES_COLORS,
    Series,
    draw_ranges,
    render_svg,
    show_values,
    style_of,
    use_powers_of_two,
)
from ..common.formats import format_size, three_digits
from .alpha_beta import AlphaBeta


def format_seconds(seconds: float) -> str:
    """Return a time with three digits and a unit, such as 52.1 µs."""
    rounded = three_digits(seconds)
    if rounded < 1e-3:
        return f"{1e6 * rounded:g} µs"
    return f"{1e3 * rounded:g} ms" if rounded < 1 else f"{rounded:g} s"


# ---- over the size of a tensor ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """Measured times, in seconds, of tensors of several sizes, in bytes, and the line that fits them."""

    name: str
    sizes: Sequence[float]
    seconds: Sequence[float]
    fit: AlphaBeta


def time_by_size(lines: Sequence[Line], limits: tuple[float, float]) -> Markup:
    """Plot measured times over sizes, the fitted lines and their 95% prediction intervals, on logarithmic axes.

    The limits of the y axis, in seconds, are given, so that several charts can be compared.
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
        use_logarithmic_axes(axes, limits, format_seconds)
        if len(lines) > 1:
            axes.legend(loc="upper left")

    return render_svg(300, f"Time of {lines[0].name} over the size of the tensor", draw)


def bandwidth_by_size(bandwidths: Mapping[str, Sequence[tuple[float, float]]]) -> Markup:
    """Plot (size, bytes per second) of several collectives on logarithmic axes."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="size of the complete tensor", ylabel="bus bandwidth, GB/s")
        for i, (name, points) in enumerate(bandwidths.items()):
            sizes, values = zip(*points, strict=True)
            again, color = divmod(i, len(SERIES_COLORS))
            style: dict[str, Any] = {
                "linestyle": (0, (4, 2)) if again else "-",
                "marker": MARKERS[color],
                "markersize": 5,
            }
            axes.plot(sizes, [value / 1e9 for value in values], color=SERIES_COLORS[color], label=name, **style)
        all_values = [value / 1e9 for points in bandwidths.values() for _, value in points]
        use_logarithmic_axes(axes, limits_of(all_values), "{:g}".format)
        figure.legend(loc="outside lower center", ncols=2)

    return render_svg(330 + 10 * len(bandwidths), "Bus bandwidth over the size of the tensor", draw)


def limits_of(values: Sequence[float]) -> tuple[float, float]:
    """Return limits of a logarithmic axis that leave some room around values."""
    return 0.6 * min(values), 1.6 * max(values)


def use_logarithmic_axes(axes: Axes, limits: tuple[float, float], show: Callable[[float], str]) -> None:
    """Make both axes logarithmic: sizes in steps of a factor of 16 on the x axis, and `limits` on the y axis."""
    use_powers_of_two(axes, 16, format_size)
    axes.set_yscale("log")
    axes.set_ylim(*limits)
    few_decades = limits[1] < 100 * limits[0]
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few_decades else (1,), numticks=8))
    axes.yaxis.set_minor_locator(NullLocator())
    show_values(axes.yaxis, show)


# ---- over the number of ranks ----------------------------------------------------------------------------------------


def over_ranks(
    title: str,
    label: str,
    series: Sequence[Series],
    *,
    seconds: bool = False,
    ideal: Callable[[int], float] | None = None,
) -> Markup:
    """Plot measured and predicted values over the number of ranks, with their ranges.

    Args:
        label: of the y axis.
        seconds: whether the values are times, on a logarithmic axis.
        ideal: the value if ranks neither waited nor shared cores.
    """

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="ranks", ylabel=label)
        if ideal is not None:
            ranks = sorted({n for times in series for n in times.points})
            axes.plot(ranks, [ideal(n) for n in ranks], color=NEUTRAL, linewidth=1.2, label="ideal")
        for i, times in enumerate(series):
            if times.points:
                # Beside each other, so that two ranges with the same number of ranks do not cover each other.
                at = [n * (1.02 if times.predicted else 0.98) for n in times.points]
                line = {"linestyle": (0, (4, 3)) if times.predicted else "-", "linewidth": 1.6}
                draw_ranges(axes, at, list(times.points.values()), **style_of(i, times) | line)
        use_powers_of_two(axes, 2, "{:,.0f}".format)
        if seconds:
            axes.set_yscale("log")
            show_values(axes.yaxis, format_seconds)
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.set_ylim(bottom=0)
        axes.legend()

    return render_svg(320, title, draw)
