"""What all charts share: SVG to embed in a page, in its colors for light and dark mode.

Text stays text, because the browser's fonts include Chinese, and is escaped by matplotlib. The same data gives the same
bytes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# matplotlib needs real colors: each of these is a placeholder for a variable of the page's style sheet.
INK, MUTED, RULE = "#010101", "#020202", "#030303"
RUN_COLORS = ("#0a0a0a", "#0b0b0b")
VARIABLES = {INK: "ink", MUTED: "muted", RULE: "rule", RUN_COLORS[0]: "a", RUN_COLORS[1]: "b"}

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
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "ytick.major.size": 0,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "none",
    "path.simplify_threshold": 0.5,
}
WIDTH = 480  # of a plot, in CSS pixels; the text stays readable on a phone, 350 pixels wide


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
