"""Sizes, Markdown and templates. Reviews, class names and file names are untrusted text and have to be escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from .errors import escape_control_characters, shorten
from .paths import TEMPLATES

MIB = 2**20


def labeled(name: str, text: object) -> str:
    """Return a line of the blocks that programs print: a name, aligned on the right, and a fact."""
    return f"{name:>14}  {escape_control_characters(str(text))}"


def markdown_cell(text: object, max_length: int = 160) -> str:
    """Escape untrusted text for a cell of a Markdown table: one line, no HTML, no markup, no control characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    line = shorten(line, max_length).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # Characters that cannot be markup stay as they are, because the text is also read in terminals: the underscore of
    # ddp_loop is not emphasis, and [0, 1] is not a link.
    return re.sub(r"[\\`*|$~]|(?<!\w)_|_(?!\w)|(?<=\])[(\[:]", r"\\\g<0>", line)


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1, *, aligned: bool = False
) -> str:
    """Return a Markdown table.

    Args:
        text_columns: the number of columns on the left that are text. The others are numbers, aligned on the right.
        aligned: pad the cells, for reading it in a terminal.
    """
    lines = [header, [*["---"] * text_columns, *["---:"] * (len(header) - text_columns)], *rows]
    if aligned:
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        kinds = ["<"] * text_columns + [">"] * (len(header) - text_columns)
        lines = [[f"{c:{kind}{w}}" for c, kind, w in zip(cells, kinds, widths, strict=True)] for cells in lines]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def render_template(name: str, **variables: Any) -> str:
    """Render a file of app/templates. HTML escapes everything except `Markup`; Markdown uses the filter `cell`."""
    options: dict[str, Any] = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=name.endswith(".html.j2"), **options)
    environment.filters.update(cell=markdown_cell, shortened=shorten, percent=percent, points=points)
    return environment.get_template(name).render(**variables)


def percent(share: float, decimals: int = 1) -> str:
    """Format a share as a percentage."""
    return f"{100 * share:.{decimals}f}%"


def points(difference: float) -> str:
    """Format a difference between two shares in percentage points, with its sign."""
    return f"{100 * difference:+z.2f}".replace("-", "−")


def mib(size: float) -> str:
    """Return a number of bytes in MiB."""
    return f"{size / MIB:,.1f}"
