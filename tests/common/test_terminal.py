"""Progress bars are shown by one rank, on a terminal, unless they are disabled; and one function decides that."""

from __future__ import annotations

import re
import sys

import pytest
from helpers.jobs import PROJECT

from app.common.terminal import hides_progress


@pytest.mark.parametrize(
    ("on_terminal", "disabled", "main", "hidden"),
    [(True, False, True, False), (False, False, True, True), (True, True, True, True), (True, False, False, True)],
)
def test_a_bar_is_shown_by_rank_0_on_a_terminal(monkeypatch, on_terminal, disabled, main, hidden):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: on_terminal, raising=False)
    assert hides_progress(disabled, main) == hidden


def test_every_bar_asks_whether_it_is_shown():
    others = set()
    for path in (PROJECT / "app").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if re.search(r"\btqdm\((?!\))", text) and "hides_progress(" not in text:
            others.add(path.name)
        if path.name != "terminal.py":
            assert "stderr.isatty" not in text, path
        assert "disable=None" not in text, path
        assert not re.search(r"disable=.* or None", text), path
    assert not others
