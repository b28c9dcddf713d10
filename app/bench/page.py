"""Sections as plain data, for the programs that do not use `core.Page` yet."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from ..common.formats import render_template
from .core import Page


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
class Section:
    """A part of the report."""

    name: str  # its key in the JSON file, and in the laboratory its name for `--sections`
    title: str
    paragraphs: Sequence[str]  # plain text that explains what is measured and how to read it
    parts: Sequence[Table | Figure]
    data: Mapping[str, Any] = field(default_factory=dict)  # all numbers, for JSON


def show(section: Section, page: Page) -> None:
    page.section(section.name, section.title, "\n".join(section.paragraphs))
    page.numbers.update(section.data)
    for part in section.parts:
        if isinstance(part, Figure):
            page.figure(part.svg)
            continue
        rows = [list(row[1:]) for row in part.rows]
        frame = pd.DataFrame(rows, [row[0] for row in part.rows], list(part.header[1:]))
        page.table(part.title, frame, part.note)


def as_html(
    title: str, facts: Mapping[str, str], sections: Sequence[Section], *, json_name: str = "communication.json"
) -> str:
    page = _page_of(sections)
    name = json_name.removesuffix(".json")
    return render_template("laboratory.html.j2", title=title, facts=facts, parts=page.parts, file=name)


def as_markdown(section: Section) -> str:
    return "\n".join(_page_of([section]).text[1:])


def _page_of(sections: Sequence[Section]) -> Page:
    with redirect_stdout(io.StringIO()):
        page = Page("", {}, Path())
        for section in sections:
            show(section, page)
    return page
