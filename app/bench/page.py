"""Reports of the communication laboratory and of scaling: pictures, charts and tables, as a page and as Markdown.

A section is plain data, which `as_html` renders for a browser and `as_markdown` for a terminal.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from ..common.charts import SERIES_COLORS
from ..common.formats import markdown_cell, markdown_table, render_template

WIDTH = 100  # of the text, in characters


@dataclass(frozen=True)
class Table:
    """A table. The first column is left-aligned, the others are numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""  # a sentence about it


@dataclass(frozen=True)
class Figure:
    """A chart from `app.common.charts.render_svg`. It is left out of the Markdown."""

    title: str
    svg: Markup
    note: str = ""


@dataclass(frozen=True)
class Chunk:
    """One cell of a picture."""

    text: str  # the value that the rank holds
    ranks: Sequence[int]  # whose data is in it; the page colors the cell accordingly


@dataclass(frozen=True)
class Picture:
    """What each rank holds before and after a collective."""

    title: str
    note: str
    # One row per rank, with one cell per chunk; None where the rank has no memory for the chunk.
    before: Sequence[Sequence[Chunk | None]]
    after: Sequence[Sequence[Chunk | None]]


Part = Table | Figure | Picture


@dataclass(frozen=True)
class Section:
    """A part of the report."""

    name: str  # its key in the JSON file, and in the laboratory its name for `--sections`
    title: str
    paragraphs: Sequence[str]  # plain text that explains what is measured and how to read it
    parts: Sequence[Part]
    data: Mapping[str, Any] = field(default_factory=dict)  # all numbers, for JSON


# ---- a page ----------------------------------------------------------------------------------------------------------


def as_html(
    title: str, facts: Mapping[str, str], sections: Sequence[Section], *, json_name: str = "communication.json"
) -> str:
    """Render a self-contained page, without scripts and without requests. All text is escaped.

    Args:
        facts: about the machine, by name.
        json_name: the file that contains all numbers.
    """
    variables = {"title": title, "facts": facts, "sections": sections, "json_name": json_name}
    return render_template("laboratory.html.j2", kind=_kind, background=_background, **variables)


def _kind(part: Part) -> str:
    return type(part).__name__.lower()


def _background(chunk: Chunk) -> str:
    """Return a CSS background with a stripe in the color of each rank whose data is in the chunk."""
    n = max(1, len(chunk.ranks))
    colors = [f"color-mix(in srgb, var(--s{rank % len(SERIES_COLORS)}) 45%, transparent)" for rank in chunk.ranks]
    stripes = [f"{color} {100 * i / n:.4g}% {100 * (i + 1) / n:.4g}%" for i, color in enumerate(colors)]
    return f"linear-gradient(90deg, {', '.join(stripes)})" if stripes else "none"


# ---- Markdown --------------------------------------------------------------------------------------------------------


def as_markdown(section: Section) -> str:
    """Render a section for a terminal and as Markdown, without control characters and without charts."""
    lines = [f"## {_escape(section.title)}\n", *(f"{_escape(text)}\n" for text in section.paragraphs)]
    for part in section.parts:
        if isinstance(part, Figure):
            continue
        lines.append(f"### {_escape(part.title)}\n")
        if part.note:
            lines.append(f"{_escape(part.note)}\n")
        lines.append(_picture_table(part) if isinstance(part, Picture) else _table(part.header, part.rows))
    return "\n".join(lines)


def _picture_table(picture: Picture) -> str:
    sides = [
        [["·" if cell is None else cell.text for cell in row] for row in side]
        for side in (picture.before, picture.after)
    ]
    width = max(len(text) for side in sides for row in side for text in row)
    rows = [
        [f"rank {rank}", *(" ".join(text.rjust(width) for text in row) for row in rows)]
        for rank, rows in enumerate(zip(*sides, strict=True))
    ]
    return markdown_table(["", "before", "after"], rows, text_columns=3, aligned=True)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    header, *rows = ([markdown_cell(cell) for cell in row] for row in (header, *rows))
    return markdown_table(header, rows, aligned=True)


def _escape(text: str) -> str:
    return textwrap.fill(markdown_cell(text, max_length=len(text)), WIDTH)
