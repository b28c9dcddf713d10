"""What the communication laboratory keeps if a section fails, and that it leaves nothing of a mistake."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest

from app.bench import communication
from app.bench.communication import SECTIONS
from app.common.errors import AgreedError, RunError, UserError
from app.settings import Settings

FLAGS = {"link": None, "seconds_per_point": 1.0, "seeds": 3}


@pytest.fixture
def settings(review_csv, tmp_path, monkeypatch, world) -> Settings:
    @contextmanager
    def this_rank(settings):
        yield world

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(communication, "join", this_rank)
    return Settings(csv=str(review_csv(90)), max_length=16, train_batch_size=8, output_dir="out")


def test_every_section_is_measured_by_a_function_with_a_title():
    assert set(communication.MEASURE) == set(SECTIONS)
    for section in communication.MEASURE.values():
        title, blank, *about = section.__doc__.splitlines()
        assert title.strip()
        assert not blank
        assert about


def test_a_used_folder_is_rejected_before_anything_is_measured(settings, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(AgreedError, match=r"^--output_dir out: exists and is not an empty folder: name a new one$"):
        communication.main(settings, sections=None, **FLAGS)
    assert capsys.readouterr().out == ""
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]


def test_nothing_is_left_of_a_mistake(settings, tmp_path):
    with pytest.raises(UserError, match="cannot be divided among --logical_ranks 2"):
        communication.main(replace(settings, train_batch_size=7), sections=["reduction"], **FLAGS)
    assert not (tmp_path / "out").exists()


def test_sections_are_written_one_after_another(settings, monkeypatch, tmp_path, capsys):
    def measure(name):
        def section(lab):
            if name == "ladder":
                raise RunError("out of memory")
            lab.page.numbers["number"] = 1

        section.__doc__ = f"About {name}\n\n    A paragraph.\n    "
        return section

    monkeypatch.setattr(communication, "MEASURE", {name: measure(name) for name in SECTIONS})
    monkeypatch.setattr(sys, "argv", ["communication.py", "--sections", "a b"])
    with pytest.raises(RunError, match="out of memory"):
        communication.main(settings, sections=["readiness", "ladder", "breakdown", "reduction"], **FLAGS)
    content = json.loads((tmp_path / "out" / "communication.json").read_text())
    assert content["sections"] == {name: {"number": 1} for name in ("breakdown", "reduction")}
    assert content["settings"]["train_batch_size"] == 8
    assert content["machine"]["command"].endswith("--sections 'a b'")
    printed = capsys.readouterr().out
    text = (tmp_path / "out" / "communication.md").read_text()
    assert text.rstrip() in printed
    assert text.startswith("# Communication laboratory: ranks 1 on 1 node(s), ")
    assert "## About reduction" in text
