"""The jinja2 environments of the reports. Reviews and class names are untrusted text: each format has its own
escape."""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

LONGEST_CELL = 160


def markdown_cell(text: object, longest: int = LONGEST_CELL) -> str:
    """Untrusted text as one cell of a Markdown table: one line, no HTML, no markup, nothing a terminal would obey."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    line = shortened(line, longest).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # What can't be markup is left alone for the terminal's sake: ddp_loop is no emphasis, [0, 1] no link.
    return re.sub(r"[\\`*|]|(?<!\w)_|_(?!\w)|(?<=\])[(\[:]", r"\\\g<0>", line)


def shortened(text: object, longest: int) -> str:
    """At most `longest` characters, the last one … where something is missing."""
    text = str(text)
    return text if len(text) <= longest else text[: longest - 1] + "…"


def percent(share: float, decimals: int = 1) -> str:
    return f"{100 * share:.{decimals}f}%"


def points(difference: float) -> str:
    """A difference of shares in percentage points, with its sign."""
    return f"{100 * difference:+z.2f}".replace("-", "−")


def markdown_environment() -> Environment:
    return _environment(autoescape=False)


def html_environment() -> Environment:
    """Everything that a template prints is escaped, but for the figures, which come as `Markup`."""
    return _environment(autoescape=True)


def _environment(autoescape: bool) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=autoescape,
    )
    filters = {"cell": markdown_cell, "shortened": shortened, "percent": percent, "points": points}
    environment.filters.update(filters)
    return environment
