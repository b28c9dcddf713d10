"""Markdown from jinja2 templates. Reviews, class names and file names are untrusted text and have to be escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from app.errors import shorten

MAX_CELL_LENGTH = 160


def markdown_cell(text: object, max_length: int = MAX_CELL_LENGTH) -> str:
    """Escape untrusted text for a cell of a Markdown table: one line, no HTML, no markup, no control characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    line = shorten(line, max_length).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # Characters that cannot be markup stay as they are, because the text is also read in terminals: the underscore of
    # ddp_loop is not emphasis, and [0, 1] is not a link.
    return re.sub(r"[\\`*|$~]|(?<!\w)_|_(?!\w)|(?<=\])[(\[:]", r"\\\g<0>", line)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """Return a Markdown table.

    Args:
        text_columns: the number of columns on the left that are text. The others are numbers, aligned on the right.
    """
    lines = [header, [*["---"] * text_columns, *["---:"] * (len(header) - text_columns)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def template_environment(templates: Path, autoescape: bool = False) -> Environment:
    """Create a jinja2 environment with the filters `cell` and `shortened`.

    Args:
        templates: the folder of the templates.
        autoescape: escape everything for HTML. Markdown templates escape with the filter `cell` instead.
    """
    environment = Environment(
        loader=FileSystemLoader(templates),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=autoescape,
    )
    environment.filters.update(cell=markdown_cell, shortened=shorten)
    return environment
