"""Reports of the communication laboratory and of scaling: pictures, charts and tables, as a page and as text.

A section is plain data. `as_html` and `as_text` render the same sections for a browser and for a terminal.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from ..common.charts import SERIES_COLORS
from ..common.errors import escape_control_characters
from ..report.environments import html_environment

WIDTH = 100  # of the text, in characters


@dataclass(frozen=True)
class Table:
    """A table. The first column is left-aligned, the others are numbers.

    Attributes:
        note: a sentence about it, or "".
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """A chart from `app.common.charts.render_svg`. It is left out of the text."""

    title: str
    svg: Markup
    note: str = ""


@dataclass(frozen=True)
class Chunk:
    """One cell of a picture.

    Attributes:
        text: the value that the rank holds.
        ranks: the ranks whose data is in it. The page colors the cell accordingly.
    """

    text: str
    ranks: Sequence[int]


@dataclass(frozen=True)
class Picture:
    """What each rank holds before and after a collective.

    Attributes:
        before: one row per rank, with one cell per chunk; None where the rank has no memory for the chunk.
        after: the same after the collective.
    """

    title: str
    note: str
    before: Sequence[Sequence[Chunk | None]]
    after: Sequence[Sequence[Chunk | None]]


Part = Table | Figure | Picture


@dataclass(frozen=True)
class Section:
    """A part of the report.

    Attributes:
        name: its key in the JSON file, and in the laboratory its name for `--sections`.
        paragraphs: plain text that explains what is measured and how to read it.
        parts: what it shows, in order.
        data: all numbers, for JSON.
    """

    name: str
    title: str
    paragraphs: Sequence[str]
    parts: Sequence[Part]
    data: Mapping[str, Any] = field(default_factory=dict)


# ---- a page ----------------------------------------------------------------------------------------------------------


def as_html(
    title: str, facts: Mapping[str, str], sections: Sequence[Section], json_name: str = "communication.json"
) -> str:
    """Render a self-contained page, without scripts and without requests. All text is escaped.

    Args:
        facts: what to say about the machine, by name.
        json_name: the file that contains all numbers.
    """
    template = html_environment().get_template("laboratory.html.j2")
    return template.render(
        title=title, facts=facts, sections=sections, json_name=json_name, kind=_kind, background=_background
    )


def _kind(part: Part) -> str:
    return type(part).__name__.lower()


def _background(chunk: Chunk) -> str:
    """Return a CSS background with a stripe in the color of each rank whose data is in the chunk."""
    n = max(1, len(chunk.ranks))
    colors = [f"color-mix(in srgb, var(--s{rank % len(SERIES_COLORS)}) 45%, transparent)" for rank in chunk.ranks]
    stripes = [f"{color} {100 * i / n:.4g}% {100 * (i + 1) / n:.4g}%" for i, color in enumerate(colors)]
    return f"linear-gradient(90deg, {', '.join(stripes)})" if stripes else "none"


# ---- text ------------------------------------------------------------------------------------------------------------


def as_text(section: Section) -> str:
    """Render a section for a terminal, without control characters and without colors."""
    title = escape_control_characters(section.title)
    lines = [title, "=" * len(title), "", *(f"{_wrap(text)}\n" for text in section.paragraphs)]
    for part in section.parts:
        if isinstance(part, Picture):
            lines += [_picture_text(part), ""]
        elif isinstance(part, Table):
            lines += [_heading(part.title, part.note), *_columns([part.header, *part.rows]), ""]
    return "\n".join(lines)


def _heading(title: str, note: str) -> str:
    return escape_control_characters(title) + (f"\n{_wrap(note)}" if note else "")


def _picture_text(picture: Picture) -> str:
    cells = [cell for rows in (picture.before, picture.after) for row in rows for cell in row]
    width = max(len(_cell_text(cell)) for cell in cells)
    sides = [
        [" ".join(_cell_text(cell).rjust(width) for cell in row) for row in rows]
        for rows in (picture.before, picture.after)
    ]
    names = [f"rank {rank}" for rank in range(len(picture.before))]
    rows = [["", "before", "after"]] + [[*row] for row in zip(names, *sides, strict=True)]
    return "\n".join([_heading(picture.title, picture.note), *_columns(rows, numbers=False)])


def _cell_text(cell: Chunk | None) -> str:
    return "·" if cell is None else cell.text


def _columns(rows: Sequence[Sequence[str]], numbers: bool = True) -> list[str]:
    """Align the cells of a table, whose columns except for the first may be numbers."""
    safe = [[escape_control_characters(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*safe, strict=True)]
    return [
        "  "
        + "   ".join(
            c.rjust(w) if numbers and i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in safe
    ]


def _wrap(text: str) -> str:
    return textwrap.fill(escape_control_characters(text), WIDTH)
