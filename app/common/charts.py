"""What all charts share: SVG to embed in a page, in its colors for light and dark mode; ranges, bars and log axes.

Text stays text, because the browser's fonts include Chinese, and is escaped by matplotlib. The same data gives the same
bytes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

# matplotlib needs real colors: each of these is a placeholder for a variable of the page's style sheet.
INK, MUTED, RULE, PAPER, NEUTRAL = "#010101", "#020202", "#030303", "#040404", "#050505"
RUN_COLORS = ("#0a0a0a", "#0b0b0b")
VARIABLES = {INK: "ink", MUTED: "muted", RULE: "rule", PAPER: "card", NEUTRAL: "neutral"}
VARIABLES |= {RUN_COLORS[0]: "a", RUN_COLORS[1]: "b"}
SERIES_COLORS = tuple(f"#0c0c{i:02x}" for i in range(8))  # of pages with more than two series
MARKERS = "oDsv^PXd"
VARIABLES |= {color: f"s{i}" for i, color in enumerate(SERIES_COLORS)}

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names may contain dollar signs
    "font.family": "sans-serif",
    "font.size": 12.5,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": RULE,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=SERIES_COLORS),
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.unicode_minus": True,
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "ytick.major.size": 0,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 11,
    "path.simplify_threshold": 0.5,
}
WIDTH = 480  # of a plot, in CSS pixels; the text stays readable on a phone, 350 pixels wide
Range = tuple[float, float, float]  # a value, and the lowest and the highest that it may have


@dataclass(frozen=True)
class Series:
    """Values with their ranges.

    Attributes:
        points: by their row, or by their position on the x axis.
        predicted: not measured: drawn with hollow markers and dashed lines.
    """

    name: str
    points: Mapping[Any, Range]
    predicted: bool = False


def render_svg(height: int, label: str, draw: Callable[[Figure], None]) -> Markup:
    """Let `draw` draw on a figure of WIDTH x height, and return the figure as an `<svg>` element."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # ignore the user's matplotlibrc
        matplotlib.rcParams.update(STYLE | {"svg.hashsalt": label})
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    # Only inside tags: the text between them contains names, which may look like colors or ids.
    svg = re.sub(r"<[^>]*>", _adapt_tag, svg)
    root = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">'
    svg = root + svg[svg.index(">") + 1 :]
    return Markup(svg)


def _adapt_tag(tag: re.Match[str]) -> str:
    """Insert the page's color variables and remove the id, which all plots share and nothing refers to."""
    text = re.sub(r' id="[A-Za-z][\w.]*_\d+"', "", tag[0])
    for color, variable in VARIABLES.items():
        text = text.replace(color, f"var(--{variable})")
    return text


# ---- points with ranges, and bars ------------------------------------------------------------------------------------


def draw_ranges(
    axes: Axes, at: Sequence[float], ranges: Sequence[Range], *, horizontal: bool = False, **marker: Any
) -> None:
    """Draw a marker at each value, styled as by `Axes.plot`, and a line over its range.

    The values are on the y axis, or with `horizontal` on the x axis; `at` has their positions on the other axis.
    """
    values, low, high = zip(*ranges, strict=True)
    (axes.hlines if horizontal else axes.vlines)(at, low, high, color=marker["color"], linewidth=2.4)
    x, y = (values, at) if horizontal else (at, values)
    axes.plot(x, y, **(marker | {"linestyle": marker.get("linestyle", ""), "markersize": marker.get("markersize", 8)}))


def points_with_ranges(
    title: str, label: str, series: Sequence[Series], *, show: Callable[[float], str], reference: float
) -> Markup:
    """Plot series next to each other, in one row for each of their points, with a vertical line at `reference`.

    `label` is the x axis's; `show` formats its values.
    """
    rows = list(series[0].points)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel=label)
        axes.axvline(reference, color=NEUTRAL, linewidth=1)
        for i, values in enumerate(series):
            at = [row + 0.24 * (i - (len(series) - 1) / 2) for row in range(len(rows))]
            draw_ranges(axes, at, [values.points[row] for row in rows], horizontal=True, **style_of(i, values))
        name_rows(axes, rows)
        show_values(axes.xaxis, show)
        figure.legend(loc="outside lower center", ncols=2)

    return render_svg(110 + 40 * len(rows), title, draw)


def style_of(i: int, series: Series) -> dict[str, Any]:
    """Return color, marker and label of the series with an index. A hollow marker fits around a filled one."""
    hollow = {"markerfacecolor": "none", "markersize": 10} if series.predicted else {"markersize": 6}
    return {"color": SERIES_COLORS[i], "marker": MARKERS[i], "label": series.name} | hollow


def draw_bars(axes: Axes, rows: Sequence[str], parts: Mapping[str, Sequence[float]]) -> list[BarContainer]:
    """Draw a bar in each row, divided into `parts` (the length of each part in each row), and return the parts."""
    bars, left = [], np.zeros(len(rows))
    for name, widths in parts.items():
        bars.append(axes.barh(range(len(rows)), widths, left=left, height=0.6, label=name))
        left = left + widths
    name_rows(axes, rows)
    return bars


# ---- axes ------------------------------------------------------------------------------------------------------------


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Write the names of the rows on the y axis, from top to bottom, with a grid for the values on the x axis."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")


def show_values(axis: Axis, show: Callable[[float], str]) -> None:
    """Format the numbers along an axis."""
    axis.set_major_formatter(lambda value, _: show(value))


def use_powers_of_two(axes: Axes, base: int, show: Callable[[float], str]) -> None:
    """Make the x axis logarithmic, with a tick at each power of `base`."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=base, numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    show_values(axes.xaxis, show)
