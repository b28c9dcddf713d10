"""A comparison's pictures: SVG to stand inside the page, in the page's own colours, light or dark.

Text stays text (the browser's fonts know Chinese) and is escaped by matplotlib; the same figures give the same bytes.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter
from numpy.typing import NDArray

# matplotlib wants real colours: each of these stands for a variable of the page's style sheet.
INK, MUTED, RULE, PAPER, NEUTRAL = "#010101", "#020202", "#030303", "#040404", "#050505"
PATHS = ("#0a0a0a", "#0b0b0b")
VARIABLES = {INK: "ink", MUTED: "muted", RULE: "rule", PAPER: "card", NEUTRAL: "neutral"}
VARIABLES |= {PATHS[0]: "a", PATHS[1]: "b"}

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a name may hold dollar signs
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
    "path.simplify_threshold": 0.5,
}
WIDTH = 480  # of a figure, in the page's pixels; the text is readable down to a phone's 350
MOST_POINTS = 1_500
LONGEST_NAME = 40
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")  # matplotlib's own powers of ten are mathtext


def _svg(height: int, label: str, draw: Callable[[Figure], None]) -> Markup:
    """What `draw` puts on a figure of WIDTH x height, as an `<svg>` element."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever a matplotlibrc of the user's says
        matplotlib.rcParams.update(STYLE | {"svg.hashsalt": label})
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    # In tags alone: between them stand names, which may look like anything.
    svg = re.sub(r"<[^>]*>", _of_the_page, svg)
    root = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">'
    svg = root + svg[svg.index(">") + 1 :]
    return Markup(svg)


def _of_the_page(tag: re.Match[str]) -> str:
    """A tag with the page's colors and without the id, which every figure shares and nothing refers to."""
    text = re.sub(r' id="[A-Za-z][\w.]*_\d+"', "", tag[0])
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    return text


def loss_curves(losses: Sequence[Sequence[float]], names: Sequence[str]) -> Markup:
    """Each step's loss, faint, and its running mean; the second run dashed over the first."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="optimizer step", ylabel="training loss (nats)")
        for values, colour, dashes in zip(losses, PATHS, ("-", (0, (5, 4))), strict=True):
            steps, raw = _thinned(np.asarray(values, dtype=float), np.mean)
            axes.plot(steps, raw, color=colour, alpha=0.22, linewidth=0.8)
            steps, smooth = _thinned(running_mean(values), np.mean)
            axes.plot(steps, smooth, color=colour, linewidth=3.2 if colour == PATHS[0] else 1.9, linestyle=dashes)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.margins(x=0.01)
        axes.set_ylim(bottom=0 if all(np.nanmin([0.0, *values]) >= 0 for values in losses) else None)

    return _svg(320, f"Training loss of {_and(names)} at each step", draw)


def loss_difference(losses: Sequence[Sequence[float]]) -> Markup:
    """|loss A - loss B| at each common step on a logarithmic axis; steps without any in a band of their own below."""
    ours, theirs = (np.asarray(values, dtype=float)[: min(map(len, losses))] for values in losses)
    equal = ours.view(np.uint64) == theirs.view(np.uint64)
    gap = np.where(equal, 0.0, np.abs(ours - theirs))

    def draw(figure: Figure) -> None:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[9, 1])
        above.set_yscale("log")
        if (gap > 0).any():
            steps, largest = _thinned(np.where(gap > 0, gap, np.nan), _largest)
            above.plot(steps, largest, color=INK, linewidth=1.1, marker="o" if len(ours) < 60 else "", markersize=3.5)
        else:
            above.set_ylim(1e-16, 1)
            above.text(0.5, 0.5, "no step differs", transform=above.transAxes, ha="center", va="center", color=MUTED)
        above.yaxis.set_major_locator(LogLocator(numticks=6))
        above.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _power_of_ten(value)))
        above.yaxis.set_minor_formatter(NullFormatter())
        above.set_ylabel("|difference of the losses|")
        above.tick_params(axis="x", which="both", length=0)
        above.spines["bottom"].set_visible(False)
        _equal_band(below, equal)

    return _svg(330, "Absolute difference of the two losses at each step", draw)


def _equal_band(axes: Axes, equal: NDArray[np.bool_]) -> None:
    """A ribbon in both colours over the stretches of steps whose losses are equal to the bit."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], equal, [False]]).astype(np.int8)))
    stretches = [(start + 0.5, end - start) for start, end in zip(edges[::2], edges[1::2], strict=True)]
    axes.broken_barh(stretches, (0.5, 0.5), facecolor=PATHS[0])
    axes.broken_barh(stretches, (0, 0.5), facecolor=PATHS[1])
    axes.set(xlabel="optimizer step", yticks=[], ylim=(-0.2, 1.1), xlim=(0.5, len(equal) + 0.5))
    axes.grid(False)
    count = f"all {len(equal)}" if equal.all() else f"{equal.sum()} of {len(equal)}"
    axes.set_title(f"equal to the bit: {count} steps", loc="left", fontsize=12.5, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def _power_of_ten(value: float) -> str:
    return f"10{str(round(np.log10(value))).translate(SUPERSCRIPTS)}"


def accuracies(rows: Sequence[dict[str, Any]]) -> Markup:
    """Dot and whisker: `rows` of {name, estimate, low, high}, the two runs first, then the floors."""
    colours = [*PATHS, *[NEUTRAL] * (len(rows) - 2)]

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="test accuracy, 95% interval")
        for place, (row, colour) in enumerate(zip(rows, colours, strict=True)):
            axes.plot([row["low"], row["high"]], [place, place], color=colour, linewidth=2.4)
            axes.plot(
                row["estimate"], place, "o", color=colour, markersize=10, markeredgecolor=PAPER, markeredgewidth=2
            )
            axes.annotate(
                f"{row['estimate']:.1%}",
                (row["estimate"], place),
                (0, 11),
                textcoords="offset points",
                ha="center",
                fontweight="bold",
            )
        axes.set_yticks(range(len(rows)), [textwrap.fill(_short(row["name"]), 20) for row in rows])
        for label, colour in zip(axes.get_yticklabels(), colours, strict=True):
            label.set_color(colour if colour in PATHS else MUTED)
        axes.set_ylim(len(rows) - 0.5, -0.75)
        axes.grid(True, axis="x")
        axes.grid(False, axis="y")
        axes.spines["bottom"].set_visible(False)
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))

    return _svg(72 * len(rows) + 60, "Test accuracies with their intervals", draw)


def reliability(calibrations: Sequence[dict[str, Any]], names: Sequence[str]) -> Markup:
    """Reliability diagram: accuracy against confidence in each bin; a dot's area grows with the rows in its bin."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="confidence", ylabel="accuracy")
        axes.plot([0, 1], [0, 1], color=NEUTRAL, linewidth=1.2, linestyle=(0, (4, 3)))
        lowest = np.ones(2)
        for calibration, colour, marker in zip(calibrations, PATHS, ("o", "D"), strict=True):
            bins = [row for row in calibration["bins"] if row["n"]]
            share = np.array([row["n"] for row in bins]) / sum(row["n"] for row in bins)
            x, y = ([row[key] for row in bins] for key in ("confidence", "accuracy"))
            axes.plot(x, y, color=colour, linewidth=1.4, alpha=0.7)
            size = (36 + 260 * share) * (1 if marker == "o" else 0.5)
            axes.scatter(x, y, size, color=colour, marker=marker, edgecolor=PAPER, linewidth=1.2, zorder=3)
            lowest = np.minimum(lowest, [min(x), min(y)])
        left, bottom = np.maximum(np.floor(lowest * 10 - 0.2) / 10, -0.04)
        axes.set(xlim=(left, 1.03), ylim=(bottom, 1.05))
        axes.grid(True, axis="both")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(PercentFormatter(1, decimals=0))
            axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))

    return _svg(340, f"Reliability diagram of {_and(names)}", draw)


def accuracy_by_length(groups: Sequence[Sequence[dict[str, Any]]], names: Sequence[str]) -> Markup:
    """Accuracy with its interval for short to long reviews, the two runs side by side."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="characters in the review", ylabel="test accuracy, 95% interval")
        for side, (run, colour, marker) in enumerate(zip(groups, PATHS, ("o", "D"), strict=True)):
            x = np.arange(len(run)) + (side - 0.5) * 0.24
            low, middle, high = ([group["accuracy"][key] for group in run] for key in ("low", "estimate", "high"))
            axes.vlines(x, low, high, color=colour, linewidth=2.4)
            axes.plot(x, middle, marker, color=colour, markersize=8, markeredgecolor=PAPER, markeredgewidth=1.6)
        labels = [f"{group['shortest']:g}–{group['longest']:g}\nn = {group['n']}" for group in groups[0]]
        axes.set_xticks(range(len(labels)), labels)
        axes.set_xlim(-0.5, len(labels) - 0.5)
        axes.tick_params(axis="x", length=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))

    return _svg(340, f"Test accuracy of {_and(names)} by length of the review", draw)


def over_seeds(pairs: Sequence[dict[str, Any]], names: Sequence[str]) -> Markup:
    """Both runs' accuracy at each seed, with a line at each road's mean."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="seed", ylabel="test accuracy")
        values = np.array([[run["accuracy"] for run in pair["runs"]] for pair in pairs])
        axes.vlines(range(len(pairs)), values.min(axis=1), values.max(axis=1), color=NEUTRAL, linewidth=1.4)
        for side, (colour, marker, size) in enumerate(zip(PATHS, ("o", "D"), (11, 5.5), strict=True)):
            axes.axhline(
                values[:, side].mean(), color=colour, linewidth=1.2, linestyle="-" if side == 0 else (0, (4, 3))
            )
            axes.plot(values[:, side], marker, color=colour, markersize=size, markeredgecolor=PAPER, markeredgewidth=1)
        axes.set_xticks(range(len(pairs)), [_short(pair["seed"]) for pair in pairs])
        axes.set_xlim(-0.6, len(pairs) - 0.4)
        axes.margins(y=0.2)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=1))

    return _svg(300, f"Test accuracy of {_and(names)} at each seed", draw)


def running_mean(values: Sequence[float], share: float = 0.03) -> NDArray[np.float64]:
    """The exponential mean of the last `share` of all steps or so, without a bias towards the start (as in Adam)."""
    keep = 1 - 1 / max(1.0, share * len(values))
    mean, smooth = 0.0, []
    for count, value in enumerate(values, start=1):
        mean = keep * mean + (1 - keep) * value
        smooth.append(mean / (1 - keep**count))
    return np.array(smooth)


def _thinned(
    values: NDArray[np.float64], summary: Callable[[NDArray[np.float64]], Any]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(steps, values), at most MOST_POINTS of each: neighbours are put together by `summary`."""
    steps = np.arange(1.0, len(values) + 1)
    if len(values) <= MOST_POINTS:
        return steps, values
    parts = np.array_split(np.arange(len(values)), MOST_POINTS)
    return np.array([steps[part].mean() for part in parts]), np.array([summary(values[part]) for part in parts])


def _largest(values: NDArray[np.float64]) -> float:
    """The largest number; NaN where there is none."""
    return float(np.fmax.reduce(values))


def _short(name: object) -> str:
    text = str(name)
    return text if len(text) <= LONGEST_NAME else text[: LONGEST_NAME - 1] + "…"


def _and(names: Sequence[str]) -> str:
    return f"{_short(names[0])} and {_short(names[1])}"
