"""Error messages with untrusted text: one line that cannot control the terminal."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.common.errors import Preempted, RunError, UserError, escape_control_characters
from app.common.files import write_json


@pytest.mark.parametrize("kind", [UserError, RunError, Preempted])
@given(text=st.text() | st.text(st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp"])))
def test_messages_are_one_line_without_control_characters(kind, text):
    message = str(kind(f"--csv {text}: no such file"))
    assert len(message.splitlines()) == 1
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in message)
    message.encode()
    assert str(kind(message)) == message, "a message that is raised again on the other ranks must not change"
    assert str(pickle.loads(pickle.dumps(kind(text)))) == str(kind(text))


def test_only_what_cannot_be_printed_is_escaped():
    assert escape_control_characters("好\u3000é\\n\x1b[31m\n\u202e\udcff") == "好\u3000é\\n\\x1b[31m\\n\\u202e\\udcff"


def test_a_path_that_is_not_utf8_survives_json(tmp_path):
    write_json(tmp_path / "settings.json", {"csv": "a\udcffb"})
    assert json.loads((tmp_path / "settings.json").read_text("utf-8")) == {"csv": "a\udcffb"}
