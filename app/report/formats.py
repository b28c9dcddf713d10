"""The jinja2 environments of the reports. Reviews and class names are untrusted text, escaped for each format."""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

LONGEST_CELL = 160


def markdown_cell(text: object, longest: int = LONGEST_CELL) -> str:
    """Return untrusted text as a cell of a Markdown table: one line without HTML, markup or control characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    line = shortened(line, longest).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # Only what could be markup is escaped, so that the text stays readable in a terminal: the underscore in ddp_loop
    # starts no emphasis, and [0, 1] is no link.
    return re.sub(r"[\\`*|]|(?<!\w)_|_(?!\w)|(?<=\])[(\[:]", r"\\\g<0>", line)


def shortened(text: object, longest: int) -> str:
    """Return at most `longest` characters of a text, ending in … if some are missing."""
    text = str(text)
    return text if len(text) <= longest else text[: longest - 1] + "…"


def percent(share: float, decimals: int = 1) -> str:
    """Return a fraction as a percentage."""
    return f"{100 * share:.{decimals}f}%"


def points(difference: float) -> str:
    """Return a difference of fractions in percentage points, with its sign."""
    return f"{100 * difference:+z.2f}".replace("-", "−")


def markdown_environment() -> Environment:
    """Return the environment for Markdown, whose templates pass untrusted text through the filter `cell`."""
    return _environment(autoescape=False)


def html_environment() -> Environment:
    """Return the environment for HTML, which escapes everything except the plots: those are `Markup`."""
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
