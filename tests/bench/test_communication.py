"""What the communication laboratory keeps if a section fails, and that it leaves nothing of a mistake."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest

from app.bench import communication
from app.bench.communication import SECTIONS
from app.common.errors import AgreedError, RunError, UserError

FLAGS = {"link": None, "seconds_per_point": 1.0, "seeds": 3}


@pytest.fixture
def settings(make_lab, monkeypatch, world):
    monkeypatch.setattr(communication, "join", lambda _: nullcontext(world))
    return make_lab(output_dir="out").settings


def test_a_used_folder_is_rejected_before_anything_is_measured(settings, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(AgreedError, match=r"^--output_dir out: exists and is not an empty folder"):
        communication.main(settings, sections=None, **FLAGS)
    assert capsys.readouterr().out == ""
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]


def test_nothing_is_left_of_a_mistake(settings, tmp_path):
    with pytest.raises(UserError, match="--train_batch_size 7 cannot be divided among --logical_ranks 2"):
        communication.main(replace(settings, train_batch_size=7), sections=["reduction"], **FLAGS)
    assert not (tmp_path / "out").exists()


def test_what_was_measured_before_a_section_failed_is_kept(settings, monkeypatch, tmp_path, capsys):
    def section(lab):
        """About a section"""
        if len(lab.page.sections) == 3:
            raise RunError("out of memory")
        lab.page.numbers["number"] = 1

    monkeypatch.setattr(communication, "MEASURE", dict.fromkeys(SECTIONS, section))
    monkeypatch.setattr("sys.argv", ["communication.py", "--sections", "a b"])
    with pytest.raises(RunError, match="out of memory"):
        communication.main(settings, sections=["readiness", "ladder", "breakdown", "reduction"], **FLAGS)
    content = json.loads((tmp_path / "out" / "communication.json").read_text())
    assert content["sections"] == {name: {"number": 1} for name in ("breakdown", "reduction")}
    assert content["settings"]["train_batch_size"] == 8
    assert content["machine"]["command"].endswith("--sections 'a b'")
    text = (tmp_path / "out" / "communication.md").read_text()
    assert text.rstrip() in capsys.readouterr().out
    assert text.startswith("# Communication laboratory: ranks 1 on 1 node(s), ")
    assert "## About a section" in text
