"""No spreadsheet runs an escaped cell, whichever separator it uses."""

from __future__ import annotations

import csv
import io
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.runs.csv_escape import escape

PARTS = ["=", "+", "-", "@", "＝", "＋", "－", "＠", ";", ",", "\t", "\r", "\n", "\r\n", " ", "'", '"', "1"]
PARTS += ["\u3000", "“", "=HYPERLINK(1)", "-1", "+1e-5", "好", "a", ".", "\u200b", "\x0b"]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=12).map("".join) | st.text()
NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?")


CELLS = {"=a": "'=a", "'=a": "''=a", "-1 star": "'-1 star", "a\n=b": "a\n'=b", 'a;"=b': "a;\"'=b", " ＝a": " '＝a"}
UNCHANGED = ("-1", "-1.5e-3", "a = b - c", "很好，-_-", "")


@pytest.mark.parametrize(("text", "cell"), [*CELLS.items(), *((text, text) for text in UNCHANGED)])
def test_an_apostrophe_precedes_each_character_that_could_begin_a_formula_and_no_other(text, cell):
    assert escape(text) == cell


@given(TEXTS, TEXTS)
@example("=a", "'=a")
def test_different_texts_have_different_cells(one, other):
    assert (escape(one) == escape(other)) == (one == other)


@given(st.lists(TEXTS, min_size=1, max_size=4))
def test_no_cell_begins_a_formula_under_any_separator(texts):
    file = io.StringIO()
    csv.writer(file, quoting=csv.QUOTE_NONNUMERIC).writerow([7, *map(escape, texts), 0.5])
    for separators in (",", ";", "\t", "[,;\t\r\n]"):
        for cell in re.split(separators, file.getvalue()):
            for line in cell.splitlines():
                visible = re.sub(r"^[\s\"“”\u200b\u202e\u2061\ufe0f]+|[\s\"]+$", "", line)
                assert not visible.startswith(tuple("=+-@＝＋－＠")) or NUMBER.fullmatch(visible), (separators, cell)


def test_escaping_a_text_of_separators_takes_linear_time():
    text = "\t\n" * 500_000  # in quadratic time, the test would exceed its time limit
    assert escape(text) == text
