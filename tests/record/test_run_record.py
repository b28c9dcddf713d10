"""What a run's folder holds at any moment: nothing is removed too early, and nothing is lost on a full disk."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from record.run_records import BATCH, SCORES, add_steps, begin, files_up_to, finish, resume_at, steps_on_disk

from app.checkpoint.resume import Resume
from app.common.errors import Preempted, RunError, UserError
from app.distributed.collectives import all_gather_object
from app.distributed.world import World
from app.record import run_record as record_module
from app.record.run_record import RunRecord
from app.runs.schema import EVALUATIONS, LATEST, RUNS, SETTINGS
from app.training import prepare


def test_each_logging_interval_prints_one_line_with_the_loss(started, capsys):
    record = started(logging_steps=3, max_steps=8)
    for steps in ((1, 2), (3,), (4, 5, 6), (), (7, 8)):
        add_steps(record, *steps)
        if 2 in steps:
            record.save_checkpoint(2)  # writes the steps too
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[0] for line in lines] == ["step 3/8", "step 6/8", "step 8/8"]


# ---- a full disk -----------------------------------------------------------------------------------------------------


def test_training_continues_on_a_full_disk_and_no_line_is_missing_later(started, capsys):
    record = started()
    add_steps(record, 1, 2)
    with files_up_to(0):
        add_steps(record, 3)
        add_steps(record, 4, 5)
        assert steps_on_disk(record) == [1, 2]
        record.save_checkpoint(5)
    assert record.checkpoints.latest_valid is None, "a checkpoint without its log lines can't be resumed"
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 2
    assert "steps.jsonl could not be written: File too large" in warnings[0]
    assert "checkpoint-5 could not be written" in warnings[1]
    add_steps(record, 6)
    assert steps_on_disk(record) == [1, 2, 3, 4, 5, 6]
    record.save_checkpoint(6)
    assert record.checkpoints.latest_valid == record.checkpoints.folder / "checkpoint-6"


def test_a_full_disk_ends_the_run_if_that_is_requested(started):
    record = started(on_save_failure="stop")
    with files_up_to(0), pytest.raises(OSError, match="File too large"):
        add_steps(record, 1)


@pytest.mark.parametrize("end", [lambda record: add_steps(record, 2), finish], ids=["step", "finish"])
def test_a_run_whose_folder_is_gone_ends_and_does_not_create_it_again(started, end):
    record = started(on_save_failure="continue")
    add_steps(record, 1)
    record.folder.rename(record.folder.with_name("elsewhere"))
    with pytest.raises(FileNotFoundError):
        end(record)
    assert not record.folder.exists()


# ---- resuming --------------------------------------------------------------------------------------------------------

EVALUATED = {"eval_strategy": "steps", "eval_steps": 5}


@pytest.fixture
def interrupted(started) -> RunRecord:
    """A run with checkpoints after steps 5 and 10 and an evaluation after the first one, killed after step 12."""
    record = started(**EVALUATED)
    add_steps(record, *range(1, 6))
    record.save_checkpoint(5)
    record.after_evaluation(5, "test", SCORES)
    add_steps(record, *range(6, 11))
    record.save_checkpoint(10)
    add_steps(record, 11, 12)
    os.close(record.run.lock)
    return record


def contents(folder: Path) -> dict[Path, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != SETTINGS.name]
    return {path: path.read_bytes() for path in files}


@pytest.mark.parametrize("step", [5, 10])
def test_resuming_removes_nothing_and_the_first_line_cuts_the_log(interrupted, started, step):
    before = contents(interrupted.folder)
    record = started(resume_at(interrupted, step), **EVALUATED)
    with pytest.raises(RunError, match=f"step {step + 1}: the gradient norm is nan"):
        add_steps(record, step + 1, grad_norm=float("nan"))
    assert contents(interrupted.folder) == before
    add_steps(record, step + 1)
    assert steps_on_disk(record) == list(range(1, step + 2))
    assert len(list(record.checkpoints.folder.iterdir())) == 2


def test_a_new_folder_gets_the_lines_so_far(interrupted, started, tmp_path):
    resume, place = replace(resume_at(interrupted, 10), folder=None), {"output_dir": str(tmp_path / "new")}
    before = contents(interrupted.folder)
    record = started(resume, **place, **EVALUATED)
    assert (steps_on_disk(record), steps_on_disk(record, EVALUATIONS)) == ([*range(1, 11)], [5])
    record.after_evaluation(10, "test", SCORES)
    add_steps(record, 11)
    assert (steps_on_disk(record), steps_on_disk(record, EVALUATIONS)) == ([*range(1, 12)], [5, 10])
    os.close(record.run.lock)
    # Killed before its first checkpoint, it starts from the other run again.
    record = started(replace(resume, folder=record.folder), **place, **EVALUATED)
    assert steps_on_disk(record) == [*range(1, 12)]
    add_steps(record, 11, 12)
    assert steps_on_disk(record) == [*range(1, 13)]
    assert contents(interrupted.folder) == before


@pytest.mark.parametrize(
    ("step", "strategy", "is_missing"),
    [(10, "steps", True), (10, "no", False), (5, "steps", False), (None, "steps", False)],
)
def test_the_evaluation_after_a_checkpoint_is_made_up_for(interrupted, started, tmp_path, step, strategy, is_missing):
    resume, place = (resume_at(interrupted, step), "run") if step else (None, "new")
    flags = {"eval_strategy": strategy, "eval_steps": 5, "output_dir": str(tmp_path / place)}
    assert begin(started(resume, begun=False, **flags)) is is_missing


def test_a_run_without_further_steps_ends_with_the_lines_up_to_its_checkpoint(interrupted, started, monkeypatch):
    record = started(resume_at(interrupted, 10), max_steps=10)
    metrics = SCORES | {"n_test": 12, "train_seconds": 1.0, "train_examples_per_second": 9.0, "hash": "f" * 64}
    monkeypatch.setattr(record_module, "write_results", lambda *_, **__: metrics)
    finish(record)
    assert steps_on_disk(record) == [*range(1, 11)]


# ---- the folder ------------------------------------------------------------------------------------------------------


def test_latest_points_only_to_a_run_that_auto_can_find(started, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    latest = tmp_path / RUNS / "ddp_loop" / LATEST
    record = started(Resume(launchers=["host:1:2.00"]), begun=False, output_dir=None)
    assert not latest.exists()
    begin(record)
    assert json.loads((latest / SETTINGS.name).read_text())["launchers"] == ["host:1:2.00"]


def test_a_folder_that_another_rank_can_not_see_is_rejected_if_checkpoints_are_written(started, monkeypatch, tmp_path):
    def seen_by_one(value: object, world: World) -> list[object]:
        return [value, False] if isinstance(value, bool) else all_gather_object(value, world)

    monkeypatch.setattr(prepare, "all_gather_object", seen_by_one)
    with pytest.raises(UserError, match=r"--output_dir .*run: rank\(s\) 1 cannot see it"):
        started()
    assert not (tmp_path / "run").exists()
    started(save_strategy="no")


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_stop_without_its_checkpoint_is_a_failure(started, monkeypatch, is_saved):
    record = started()
    monkeypatch.setattr(record.stop, "requested", lambda: True)
    if not is_saved:
        monkeypatch.setattr(record.checkpoints, "save", lambda *_: False)
    with pytest.raises(Preempted if is_saved else RunError, match="after step 1 of 20, on request"):
        record.after_step(1, torch.tensor([0.5]), torch.tensor(1.0), learning_rate=1e-3, batches=[BATCH])
