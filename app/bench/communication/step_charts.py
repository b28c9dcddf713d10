"""Charts of the laboratory's sections on training steps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from ...profiling.breakdown import CATEGORIES, StepTimes
from ...report.charts import NEUTRAL, SERIES_COLORS, render_svg
from .step_variants import Comparison


def ratios_chart(comparisons: Sequence[Comparison], label: str, unit: str) -> Markup:
    """Plot the median of each variant's ratios with their range, next to each other for each model."""

    def draw(figure: Figure) -> None:
        names = list(comparisons[0].seconds)
        axes = figure.add_subplot(xlabel=f"time per {unit}, relative to {names[0]}")
        for i, comparison in enumerate(comparisons):
            for row, name in enumerate(names):
                ratios = comparison.ratios(name)
                y = row + (i - (len(comparisons) - 1) / 2) * 0.25
                color = SERIES_COLORS[i]
                axes.plot([ratios[0], ratios[-1]], [y, y], color=color, linewidth=3, alpha=0.4)
                axes.plot(
                    statistics.median(ratios),
                    y,
                    "o",
                    color=color,
                    markersize=7,
                    label=None if row else comparison.model,
                )
        axes.axvline(1, color=NEUTRAL, linewidth=1)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(axis="x")
        axes.grid(axis="y", visible=False)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        figure.legend(loc="outside lower center", ncols=2, fontsize=11)

    n = len(comparisons[0].seconds)
    return render_svg(110 + 44 * n, label, draw)


def breakdown_chart(steps: Mapping[str, StepTimes], label: str) -> Markup:
    """Draw the step of each model as a bar, divided into its parts."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="share of the step, %")
        left = [0.0] * len(steps)
        for i, name in enumerate(CATEGORIES):
            widths = [100 * step.parts[name] / step.total for step in steps.values()]
            axes.barh(range(len(steps)), widths, left=left, height=0.55, color=SERIES_COLORS[i], label=name)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(steps)), list(steps))
        axes.set_ylim(len(steps) - 0.5, -0.5)
        axes.set_xlim(0, 100)
        axes.grid(axis="x")
        axes.grid(axis="y", visible=False)
        figure.legend(loc="outside lower center", ncols=3, fontsize=11)

    return render_svg(150 + 50 * len(steps), label, draw)
