"""Charts of `app.bench.scaling`: filled markers are measured, hollow ones and dashed lines are predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from ...report.charts import NEUTRAL, PAPER, SERIES_COLORS, render_svg
from ..charts import MARKERS, format_seconds
from .predict import Interval

Points = Mapping[int, Interval]  # by the number of ranks
MEASURED, PREDICTED = SERIES_COLORS[:2]


def over_ranks(
    title: str,
    label: str,
    measured: Points,
    predicted: Points,
    ideal: Callable[[int], float],
) -> Markup:
    """Plot measured and predicted values over the number of ranks, with their intervals.

    Args:
        label: of the y axis.
        ideal: the value if ranks neither waited nor shared cores.
    """

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="ranks", ylabel=label)
        ranks = sorted({*measured, *predicted})
        axes.plot(ranks, [ideal(n) for n in ranks], color=NEUTRAL, linewidth=1.2, label="ideal")
        _draw(axes, measured, MEASURED, "o", "measured", filled=True)
        _draw(axes, predicted, PREDICTED, "D", "predicted", filled=False)
        _use_ranks(axes)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=11)

    return render_svg(320, title, draw)


def by_algorithm(title: str, label: str, series: Mapping[str, Points], measured: Points, seconds: bool) -> Markup:
    """Plot the predictions for several all-reduce algorithms over the number of ranks, and what was measured.

    Args:
        seconds: whether the values are times, on a logarithmic axis.
    """

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="ranks", ylabel=label)
        for i, (name, points) in enumerate(series.items()):
            _draw(axes, points, SERIES_COLORS[1 + i], MARKERS[1 + i], f"{name}, predicted", filled=False)
        if measured:
            _draw(axes, measured, MEASURED, "o", "measured", filled=True)
        _use_ranks(axes)
        if seconds:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))
            axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
        else:
            axes.set_ylim(bottom=0)
        axes.legend(fontsize=11)

    return render_svg(320, title, draw)


def side_by_side(
    title: str, names: Sequence[str], measured: Sequence[Interval], predicted: Sequence[Interval]
) -> Markup:
    """Plot measured and predicted step times of several configurations next to each other."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="time of a step")
        for side, (intervals, color, marker, name) in enumerate(
            ((measured, MEASURED, "o", "measured"), (predicted, PREDICTED, "D", "predicted"))
        ):
            for position, one in enumerate(intervals):
                y = position + 0.24 * (side - 0.5)
                axes.plot([one.low, one.high], [y, y], color=color, linewidth=2)
                axes.plot(
                    one.middle,
                    y,
                    marker,
                    color=color,
                    markerfacecolor=color if side == 0 else PAPER,
                    markersize=8,
                    label=name if position == 0 else None,
                )
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.grid(True, axis="x")
        axes.grid(False, axis="y")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))
        figure.legend(loc="outside lower center", ncols=2, fontsize=11)

    return render_svg(100 + 36 * len(names), title, draw)


def _draw(axes: Axes, points: Points, color: str, marker: str, name: str, filled: bool) -> None:
    ranks = sorted(points)
    beside = [n * (0.98 if filled else 1.02) for n in ranks]  # so that two intervals do not cover each other
    axes.vlines(beside, [points[n].low for n in ranks], [points[n].high for n in ranks], color=color, linewidth=2)
    axes.plot(
        ranks,
        [points[n].middle for n in ranks],
        marker=marker,
        color=color,
        linestyle="-" if filled else (0, (4, 3)),
        linewidth=1.6,
        markersize=6 if filled else 10,  # a hollow marker around a filled one: both are visible
        markerfacecolor=color if filled else "none",
        label=name,
    )


def _use_ranks(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
