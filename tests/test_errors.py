"""Messages made of untrusted text: one line that a terminal shows and does not obey."""

from __future__ import annotations

import io
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import compare
from app.data.download import DownloadError
from app.errors import (
    Preempted,
    RunError,
    UserError,
    escape_control_characters,
    escape_unencodable_output,
)
from app.files import write_json


@pytest.mark.parametrize("kind", [UserError, RunError, Preempted, DownloadError])
@given(text=st.text() | st.text(st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp"])))
def test_no_message_has_a_control_character_or_a_second_line(kind, text):
    message = str(kind(f"--csv {text}: no such file"))
    assert len(message.splitlines()) == 1
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in message)
    message.encode()
    assert str(kind(message)) == message, "a message that travels to the other ranks stays the same"
    assert str(pickle.loads(pickle.dumps(kind(text)))) == str(kind(text))


def test_what_is_printable_stays_as_it_is():
    assert escape_control_characters("好\u3000的 é\\n") == "好\u3000的 é\\n"
    assert escape_control_characters("\x1b[31m\n\u202e\udcff") == "\\x1b[31m\\n\\u202e\\udcff"


def test_a_path_that_is_no_unicode_can_be_written_and_read_back(tmp_path):
    write_json(tmp_path / "settings.json", {"csv": "a\udcffb"})
    assert json.loads((tmp_path / "settings.json").read_text("utf-8")) == {"csv": "a\udcffb"}


def test_an_output_that_can_t_show_a_character_gets_an_escape(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii", errors="strict", write_through=True))
    escape_unencodable_output()
    print("好")
    assert written.getvalue() == b"\\u597d\n"


def test_compare_prints_its_help_whatever_the_encoding(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii", errors="strict", write_through=True))
    monkeypatch.setattr("sys.argv", ["compare", "--help"])
    with pytest.raises(SystemExit) as left:
        compare.main()
    assert left.value.code == 0
    assert b"[--flag VALUE \\u2026]" in written.getvalue()
