"""The laboratory's report: the page and the Markdown show everything, and untrusted text stays text in both."""

from __future__ import annotations

import re

import pytest
from helpers.html_page import Page
from markupsafe import Markup

from app.bench.page import Chunk, Figure, Picture, Section, Table, as_html, as_markdown

HOSTILE = "<script>document.title='ran'</script><img src=x onerror=alert(1)> \x1b[31m{{ 7 * 7 }}"
BEFORE = [[Chunk("11", [0]), Chunk("12", [0])], [None, None]]
AFTER = [[Chunk("32", [0, 1]), None], [None, Chunk("34", [1])]]


def section(text: str = "explained") -> Section:
    parts = [
        Picture(f"sum {text}", f"a picture {text}", BEFORE, AFTER),
        Figure(f"chart {text}", Markup("<svg><text>drawn</text></svg>"), f"a chart {text}"),
        Table(f"times {text}", ("what", f"ms {text}"), [("first", "1.5"), (f"row {text}", "22")], f"a table {text}"),
    ]
    return Section("example", f"Example {text}", [f"One. {text}", "Two."], parts, {"value": 1})


def test_the_page_shows_every_part():
    page = Page(as_html("Title", {"ranks": "2 on 1 node(s)"}, [section(), section("again")]))
    for text in (
        "Title",
        "2 on 1 node(s)",
        "Example explained",
        "Example again",
        "One. explained",
        "a picture explained",
    ):
        assert text in page.text, text
    for text in ("rank 1", "32", "drawn", "a chart explained", "times explained", "ms again", "row again", "1.5", "22"):
        assert text in page.text, text
    assert page.tags.count("svg") == 2
    assert page.tags.count("section") == 2


def test_the_page_has_no_scripts_and_no_requests():
    source = as_html(HOSTILE, {HOSTILE: HOSTILE}, [section(HOSTILE)])
    page = Page(source)
    assert not {"script", "img", "iframe", "object", "embed", "link", "form", "base"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
    assert HOSTILE in page.text
    assert "default-src 'none'" in source


def test_a_cell_has_the_colors_of_the_ranks_in_it():
    page = as_html("Title", {}, [section()])
    styles = [set(re.findall(r"var\((--s\d)\)", style)) for style in re.findall(r'<td style="([^"]*)"', page)]
    assert styles == [{"--s0"}, {"--s0"}, {"--s0", "--s1"}, {"--s1"}]


def test_the_markdown_is_aligned_and_leaves_out_charts():
    text = as_markdown(section())
    lines = text.splitlines()
    at = lines.index("a picture explained")
    assert lines[at + 2 : at + 6] == [
        "|        | before | after |",
        "| ---    | ---    | ---   |",
        "| rank 0 | 11 12  | 32  · |",
        "| rank 1 |  ·  ·  |  · 34 |",
    ]
    at = lines.index("a table explained")
    assert lines[at + 2 : at + 6] == [
        "| what          | ms explained |",
        "| ---           |         ---: |",
        "| first         |          1.5 |",
        "| row explained |           22 |",
    ]
    assert "chart" not in text
    assert "drawn" not in text


def test_the_markdown_has_no_control_characters_and_no_html():
    text = as_markdown(section(HOSTILE))
    assert all(line.isprintable() for line in text.splitlines())
    assert "<script" not in text
    assert "&lt;script&gt;" in text


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_picture_fits_into_a_terminal(ranks):
    rows = [[Chunk(str(100 * rank + i), [rank]) for i in range(ranks)] for rank in range(ranks)]
    text = as_markdown(Section("name", "Title", [], [Picture("p", "", rows, rows)]))
    assert max(map(len, text.splitlines())) <= 80
