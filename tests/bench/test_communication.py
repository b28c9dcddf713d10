"""What the communication laboratory keeps if a section fails, and that it leaves nothing of a mistake."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest

from app.bench import communication
from app.bench.communication import SECTIONS
from app.common.errors import RunError, UserError


@pytest.fixture
def start(make_lab, monkeypatch, world):
    """A function that measures some sections into the folder `out`."""
    monkeypatch.setattr(communication, "join", lambda _: nullcontext(world))
    settings = make_lab(output_dir="out").settings

    def run(*sections, **changes):
        flags = {"sections": sections, "link": None, "seconds_per_point": 1.0, "seeds": 3}
        communication.main(replace(settings, **changes), **flags)

    return run


def test_nothing_is_left_of_a_mistake(start, tmp_path):
    with pytest.raises(UserError, match="--train_batch_size 7 cannot be divided among --logical_ranks 2"):
        start("reduction", train_batch_size=7)
    assert not (tmp_path / "out").exists()


def test_what_was_measured_before_a_section_failed_is_kept(start, monkeypatch, tmp_path, capsys):
    def section(lab):
        """About a section"""
        if len(lab.page.sections) == 3:
            raise RunError("out of memory")
        lab.page.numbers["number"] = 1

    monkeypatch.setattr(communication, "MEASURE", dict.fromkeys(SECTIONS, section))
    with pytest.raises(RunError, match="out of memory"):
        start("readiness", "ladder", "breakdown", "reduction")
    content = json.loads((tmp_path / "out" / "communication.json").read_text())
    assert content["sections"] == {name: {"number": 1} for name in ("breakdown", "reduction")}
    assert content["settings"]["train_batch_size"] == 8
    text = (tmp_path / "out" / "communication.md").read_text()
    assert text.rstrip() in capsys.readouterr().out
    assert text.startswith("# Communication laboratory: ranks 1 on 1 node(s), ")
    assert "## About a section" in text
