"""What the laboratory checks before it measures, and what it keeps if a later section fails."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager

import pytest

from app.bench.communication import __main__ as communication
from app.bench.communication import gpus, training_step
from app.bench.communication.sections import Options, check
from app.bench.page import Section
from app.common.errors import AgreedError, RunError, UserError
from app.flags import SECTIONS
from app.runs.hashes import hash_weights
from app.settings import Settings
from app.training.build import build_data

OPTIONS = Options(largest=2**20, seconds_per_point=1.0, seeds=3)
ON_GPUS = ("backends", "data_parallel")
HERE = [name for name in SECTIONS if name not in (*ON_GPUS, "point_to_point")]  # on one rank without a GPU


@pytest.fixture
def settings(review_csv, tmp_path, monkeypatch) -> Settings:
    monkeypatch.chdir(tmp_path)
    return Settings(csv=str(review_csv(90)), max_length=16, train_batch_size=8, output_dir="out")


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"strategy": "zero3"},
        {"precision": "fp16"},
        {"ddp_comm_hook": "power_sgd"},
        {"gradient_accumulation_steps": 4},
    ],
)
def test_every_section_can_be_measured_with_legal_settings(settings, world, change):
    for name, value in change.items():
        setattr(settings, name, value)
    check(HERE, settings, OPTIONS, n_train=81, world=world)


def test_a_batch_that_one_section_cannot_divide_is_refused_before_any_is_measured(settings, world):
    settings.train_batch_size = 7
    check(["collectives", "buckets", "compression"], settings, OPTIONS, n_train=81, world=world)
    problem = "^section reduction: --train_batch_size 7 cannot be divided among --logical_ranks 2.*--sections"
    with pytest.raises(UserError, match=problem):
        check(HERE, settings, OPTIONS, n_train=81, world=world)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("backends", "needs 1 or more GPUs: NCCL connects GPUs only"),
        ("data_parallel", "needs 2 or more GPUs: DataParallel divides a batch among GPUs"),
        ("point_to_point", "a message needs two ranks: start more"),
        ("collectives", "--largest_mib 0.001.*: a fit needs 3 sizes"),
        ("batch_size", "3 training rows are not enough for a batch"),
    ],
)
def test_a_section_that_cannot_be_measured_here_is_named(settings, world, name, problem):
    options = Options(largest=1049, seconds_per_point=1.0, seeds=3)
    with pytest.raises(UserError, match=f"^section {name}: {problem}.*--sections"):
        check([name], settings, options, n_train=3, world=world)


def test_a_step_of_data_parallel_trains(settings, world):
    """Without GPUs, DataParallel calls the model itself."""
    data = build_data(settings, world)
    weights = []
    build = gpus.build_named

    def build_and_keep(*arguments, **options):
        weights.append(build(*arguments, **options))
        return weights[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpus, "build_named", build_and_keep)
        for make in (gpus.ddp_step, gpus.data_parallel_step):
            before = hash_weights(build(settings.model, settings, data, world=world))
            step = make(settings.model, settings, data, world=world)
            assert hash_weights(weights[-1]) == before
            assert gpus.memory_of_step(step, world) == 0
            assert hash_weights(weights[-1]) != before


def test_a_used_folder_is_refused_before_anything_is_measured(settings, world, monkeypatch, tmp_path, capsys):
    @contextmanager
    def this_rank(settings):
        yield world

    monkeypatch.setattr(communication, "join", this_rank)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(AgreedError, match=r"^--output_dir out: exists and is not an empty folder: name a new one$"):
        communication.main(settings, sections=None, link=None, largest_mib=1.0, seconds_per_point=1.0, seeds=1)
    assert capsys.readouterr().out == ""
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]


def test_sections_are_written_one_after_another(settings, world, monkeypatch, tmp_path, capsys):
    @contextmanager
    def this_rank(settings):
        yield world

    def measure(name, *_, **__):
        if name == "no_sync":
            raise RunError("out of memory")
        return Section(name, f"About {name}", ["A paragraph."], [], {"number": 1})

    monkeypatch.setattr(communication, "join", this_rank)
    monkeypatch.setattr(training_step, "measure_step", measure)
    monkeypatch.setattr(sys, "argv", ["communication.py", "--sections", "a b"])
    with pytest.raises(RunError, match="out of memory"):
        communication.main(
            settings,
            sections=["buckets", "no_sync", "breakdown"],
            link=None,
            largest_mib=1.0,
            seconds_per_point=1.0,
            seeds=3,
        )
    content = json.loads((tmp_path / "out" / "communication.json").read_text())
    assert content["sections"] == {name: {"number": 1} for name in ("breakdown", "buckets")}
    assert content["settings"]["train_batch_size"] == 8
    assert content["machine"]["command"].endswith("--sections 'a b'")
    printed = capsys.readouterr().out
    text = (tmp_path / "out" / "communication.md").read_text()
    assert text.rstrip() in printed
    assert text.startswith("# Communication laboratory: ranks 1 on 1 node(s), ")
    assert "About buckets" in (tmp_path / "out" / "communication.html").read_text()
