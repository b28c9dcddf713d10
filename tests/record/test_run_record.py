"""What a run's folder holds at any moment: nothing is removed too early, and nothing is lost on a full disk."""

from __future__ import annotations

import json

import pytest
from record.conftest import SCORES, begin, do_steps, files_up_to, finish, on_disk

from app.common.errors import Preempted, RunError, UserError
from app.distributed.collectives import all_gather_object
from app.distributed.world import World
from app.runs.schema import LATEST, RUNS, SETTINGS
from app.training import prepare

# ---- a full disk -----------------------------------------------------------------------------------------------------


def test_training_continues_on_a_full_disk_and_no_line_is_missing_later(started, capsys):
    record = started()
    do_steps(record, 2)
    with files_up_to(0):
        do_steps(record, 3)
    assert on_disk(record) == [1, 2]
    assert record.checkpoints.latest_valid is None, "a checkpoint without its log lines can't be resumed"
    log, checkpoint = (line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: "))
    assert "steps.jsonl could not be written: File too large" in log
    assert "checkpoint-5 could not be written" in checkpoint
    record.save_checkpoint(5)
    assert on_disk(record) == [1, 2, 3, 4, 5]
    assert record.checkpoints.latest_valid == record.checkpoints.folder / "checkpoint-5"


@pytest.mark.parametrize(("end", "problem"), [(do_steps, "run: the run's folder is gone"), (finish, "predictions.csv")])
def test_a_run_whose_folder_is_gone_ends_and_does_not_create_it_again(started, end, problem):
    record = started()
    do_steps(record)
    record.folder.rename(record.folder.with_name("elsewhere"))
    with pytest.raises(FileNotFoundError, match=problem):
        end(record)
    assert not record.folder.exists()


@pytest.mark.parametrize(("room", "end"), [(2**40, Preempted), (0, RunError)])
def test_a_stop_without_its_checkpoint_is_a_failure(started, room, end):
    record = started()
    record.stop.requested = lambda: True
    with files_up_to(room), pytest.raises(end, match="after step 1 of 20, on request"):
        do_steps(record)


# ---- resuming --------------------------------------------------------------------------------------------------------
# tests/launched/test_laws.py finds the lines so far in a new folder. tests/launched/test_recovery.py fails before the
# first step of a resumed run is done, and finds all files unchanged.


@pytest.mark.parametrize(
    ("step", "strategy", "is_missing"),
    [(10, "steps", True), (10, "no", False), (5, "steps", False), (None, "steps", False)],
)
def test_the_evaluation_after_a_checkpoint_is_made_up_for(started, tmp_path, step, strategy, is_missing):
    interrupted = started()
    do_steps(interrupted, 5)
    interrupted.after_evaluation(5, "test", SCORES)
    do_steps(interrupted, 5)
    checkpoint = str(interrupted.checkpoints.folder / f"checkpoint-{step}") if step else None
    flags = {"eval_strategy": strategy, "eval_steps": 5, "output_dir": str(tmp_path / "new")}
    assert begin(started(begun=False, resume_from_checkpoint=checkpoint, **flags)) is is_missing


# ---- the folder ------------------------------------------------------------------------------------------------------


def test_latest_points_only_to_a_run_that_auto_can_find(started, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    latest = tmp_path / RUNS / "ddp_loop" / LATEST
    record = started(begun=False, output_dir=None)
    assert not latest.exists()
    begin(record)
    assert json.loads((latest / SETTINGS.name).read_text())["path"] == "ddp_loop"


def test_a_folder_that_another_rank_can_not_see_is_rejected_if_checkpoints_are_written(started, monkeypatch, tmp_path):
    def seen_by_one(value: object, world: World) -> list[object]:
        return [value, False] if isinstance(value, bool) else all_gather_object(value, world)

    monkeypatch.setattr(prepare, "all_gather_object", seen_by_one)
    with pytest.raises(UserError, match=r"--output_dir .*run: rank\(s\) 1 cannot see it"):
        started()
    assert not (tmp_path / "run").exists()
    started(save_strategy="no")
