"""What a run's folder holds at any moment: nothing is removed too early, and nothing is lost on a full disk."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.run_records import (
    Copies,
    References,
    add_steps,
    begin,
    correct_predictions,
    evaluations_on_disk,
    steps_on_disk,
)
from helpers.worlds import fake_world
from torch import nn

from app.checkpoint.resume import Resume
from app.common.errors import Preempted, RunError, UserError
from app.distributed import collectives
from app.model.identity import ModelIdentity
from app.record import run_folder as folder_module
from app.record import run_record as record_module
from app.record import steps as steps_module
from app.record.run_folder import RunFolder, RunInfo
from app.record.run_record import RunRecord
from app.record.steps import MetricsLog
from app.runs.folder import lock
from app.runs.schema import EVALUATIONS, LATEST, METRICS, RUN_STATE, RUNS, SETTINGS
from app.settings import Settings

# ---- the console -----------------------------------------------------------------------------------------------------


def test_each_logging_interval_prints_one_line_with_the_loss(new_record, capsys, fill):
    record, plan = new_record(logging_steps=3, max_steps=8)
    begin(record, plan)
    add_steps(record, 1, 2)
    record.save_checkpoint(2, fill)  # writes the steps too
    add_steps(record, 3)
    add_steps(record, 4, 5, 6)
    record.write_steps()
    add_steps(record, 7, 8)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[0] for line in lines] == ["step 3/8", "step 6/8", "step 8/8"]
    assert lines[0].startswith("step 3/8 (epoch 0.23): loss 0.5000, grad norm 1.25, learning rate 0.001, ")
    assert lines[0].endswith(" reviews/s")


def test_the_speed_in_a_console_line_is_that_of_all_its_steps():
    line = {"step": 10, "epoch": 0.09, "loss": 0.69314, "grad_norm": 1.2345, "learning_rate": 9.1e-05}
    lines = [line | {"step": 9, "examples": 100, "seconds": 1.0}, line | {"examples": 140, "seconds": 0.5}]
    assert steps_module.console_line(lines, 218) == (
        "step 10/218 (epoch 0.09): loss 0.6931, grad norm 1.23, learning rate 9.1e-05, 160 reviews/s"
    )


def test_only_the_main_process_prints(tmp_path, monkeypatch, capsys):
    record = record_of_rank_1(tmp_path, monkeypatch)
    record.run_folder.is_reset = True
    record.plan = SimpleNamespace(total_steps=1, steps_per_epoch=1)
    record.steps.start_clock()
    monkeypatch.setattr(steps_module, "all_gather", lambda values, world: torch.stack([values] * world.size))
    add_steps(record, 1)
    record.write_evaluation(1, "test", {"n": 12, "accuracy": 0.5, "f1": 0.5, "loss": 0.7})
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


# ---- ranks -----------------------------------------------------------------------------------------------------------


def record_of_rank_1(folder: Path, monkeypatch) -> RunRecord:
    """The record of the second of two ranks; the first one never has a problem."""
    settings = Settings(load_best_model_at_end=True, validation_size=0.2)
    info = RunInfo(
        path_name="ddp_loop",
        settings=settings,
        table=None,
        split=None,
        duplicates={},
        world=fake_world(1, 2),
        devices=["cpu"] * 2,
        model=ModelIdentity(),
    )
    monkeypatch.setattr(record_module, "all_gather_object", lambda value, world: [value] * world.size)
    monkeypatch.setattr(collectives, "first_failure", lambda problem, world: problem)
    return RunRecord(RunFolder(folder, info, Resume(), lock=None), lambda step: [step])


def test_every_rank_takes_part_in_gathering_the_model(tmp_path, monkeypatch):
    """Under a sharded strategy it is a collective, for which rank 0 would wait."""
    record = record_of_rank_1(tmp_path, monkeypatch)
    record.run_folder.is_reset = True
    strategy = Copies()
    record.best.keep(1, strategy, nn.Linear(2, 2), metrics={"accuracy": 0.5})
    assert strategy.gathered == 1
    assert record.best.best.step == 1
    record.finish(strategy, nn.Linear(2, 2), tokenizer=None, logits=None, scores=None)
    assert strategy.gathered == 2
    assert list(tmp_path.iterdir()) == []


# ---- the best weights ------------------------------------------------------------------------------------------------

BEST = {"validation_size": 0.2, "load_best_model_at_end": True}


def best_folders(record: RunRecord) -> list[str]:
    return sorted(path.name for path in record.checkpoints.folder.glob("best-*"))


def test_without_checkpoints_only_the_best_weights_so_far_are_kept(new_record):
    record, plan = new_record(**BEST | {"save_strategy": "no"})
    begin(record, plan)
    for step, accuracy in enumerate([0.5, 0.6, 0.6, 0.7, 0.65, 0.8], start=1):
        record.best.keep(step, Copies(), nn.Linear(2, 2), metrics={"accuracy": accuracy})
        assert best_folders(record) == [f"best-{record.best.best.step}"]
    assert best_folders(record) == ["best-6"]


def test_best_weights_that_a_checkpoint_needs_are_kept_with_it(new_record, fill):
    record, plan = new_record(**BEST | {"save_total_limit": 1})
    begin(record, plan)
    record.best.keep(1, Copies(), nn.Linear(2, 2), metrics={"accuracy": 0.5})
    add_steps(record, *range(1, 6))
    record.save_checkpoint(5, fill)
    record.best.keep(6, Copies(), nn.Linear(2, 2), metrics={"accuracy": 0.6})
    record.best.keep(7, Copies(), nn.Linear(2, 2), metrics={"accuracy": 0.7})
    assert best_folders(record) == ["best-1", "best-7"]  # checkpoint-5 resumes with best-1
    add_steps(record, *range(6, 11))
    record.save_checkpoint(10, fill)
    assert best_folders(record) == ["best-7"]


def test_the_best_weights_are_loaded(new_record, capsys):
    record, plan = new_record(**BEST | {"metric_for_best_model": "loss"})
    begin(record, plan)
    strategy, best, last = Copies(), nn.Linear(2, 2), nn.Linear(2, 2)
    record.best.keep(1, strategy, best, metrics={"loss": 0.5})
    record.best.keep(2, strategy, last, metrics={"loss": 0.75})
    record.best.load(last, record.steps.last_step)
    assert torch.equal(last.weight, best.weight)
    assert "best weights  of step 1: validation loss 0.5000" in capsys.readouterr().out


def test_damaged_best_weights_are_not_loaded(new_record):
    record, plan = new_record(**BEST)
    begin(record, plan)
    record.best.keep(1, Copies(), nn.Linear(2, 2), metrics={"accuracy": 0.5})
    (record.checkpoints.folder / "best-1" / "model.safetensors").write_bytes(b"")
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    with pytest.raises(RunError, match=r"best-1: the best weights are damaged: model\.safetensors"):
        record.best.load(model, record.steps.last_step)
    assert torch.equal(model.weight, before)


# ---- a full disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(monkeypatch):
    """A disk that can be filled: `disk["full"] = True`."""
    state = {"full": False}
    append = MetricsLog.append

    def append_if_not_full(self: MetricsLog, lines: str) -> None:
        if state["full"]:
            self.pending += lines.encode()
            if self.pending:
                raise OSError(errno.ENOSPC, "No space left on device")
        append(self, lines)

    monkeypatch.setattr(MetricsLog, "append", append_if_not_full)
    return state


def test_training_continues_on_a_full_disk_and_no_line_is_missing_later(new_record, disk, capsys, fill):
    record, plan = new_record()
    begin(record, plan)
    add_steps(record, 1, 2)
    disk["full"] = True
    add_steps(record, 3)
    add_steps(record, 4, 5)
    assert steps_on_disk(record) == [1, 2]
    record.save_checkpoint(5, fill)
    assert record.checkpoints.latest_valid is None, "a checkpoint without its log lines can't be resumed"
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 2
    assert "steps.jsonl could not be written: No space left on device" in warnings[0]
    assert "checkpoint-5 could not be written" in warnings[1]
    disk["full"] = False
    add_steps(record, 6)
    assert steps_on_disk(record) == [1, 2, 3, 4, 5, 6]
    record.save_checkpoint(6, fill)
    assert record.checkpoints.latest_valid == record.checkpoints.folder / "checkpoint-6"


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_full_disk_ends_the_run_if_that_is_requested_or_the_folder_is_gone(new_record, disk, is_gone):
    record, plan = new_record(on_save_failure="continue" if is_gone else "stop")
    begin(record, plan)
    disk["full"] = True
    if is_gone:
        record.folder.rename(record.folder.with_name("elsewhere"))
    with pytest.raises(OSError, match="No space left"):
        add_steps(record, 1)


# ---- resuming --------------------------------------------------------------------------------------------------------


@pytest.fixture
def interrupted(new_record, fill):
    """A run with checkpoints after steps 5 and 10 and an evaluation after each, killed after step 12."""
    record, plan = new_record(eval_strategy="steps", eval_steps=5)
    begin(record, plan)
    for step in (5, 10):
        add_steps(record, *range(step - 4, step + 1))
        record.save_checkpoint(step, fill)
        record.write_evaluation(step, "test", {"n": 12, "accuracy": 0.5, "f1": 0.5, "loss": 0.7})
    add_steps(record, 11, 12)
    (record.folder / METRICS.name).write_text("{}")
    return record


def resume_at(record: RunRecord, step: int) -> Resume:
    checkpoint = record.checkpoints.folder / f"checkpoint-{step}"
    return Resume(record.folder, checkpoint, json.loads((checkpoint / RUN_STATE).read_text()))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_nothing_is_removed_before_the_first_steps_are_written(interrupted, new_record):
    before = contents(interrupted.folder)
    record, plan = new_record(resume_at(interrupted, 5), eval_strategy="steps", eval_steps=5)
    assert begin(record, plan)
    record.write_evaluation(5, "test", {"n": 12, "accuracy": 0.5, "f1": 0.5, "loss": 0.7})
    record.steps.last_step = 5
    record.write_steps()  # before the evaluation, as there are no steps yet
    assert contents(interrupted.folder) == before
    add_steps(record, 6)
    assert sorted(path.name for path in record.checkpoints.folder.iterdir()) == ["checkpoint-5"]
    assert steps_on_disk(record) == [1, 2, 3, 4, 5, 6]
    assert evaluations_on_disk(record) == [5]
    assert not (record.folder / METRICS.name).exists()


def test_a_first_step_that_is_not_finite_removes_nothing(interrupted, new_record):
    before = contents(interrupted.folder)
    record, plan = new_record(resume_at(interrupted, 5))
    begin(record, plan)
    with pytest.raises(RunError, match="step 6: the gradient norm is nan"):
        add_steps(record, 6, grad_norm=float("nan"))
    assert contents(interrupted.folder) == before


def test_checkpoints_that_can_not_be_removed_keep_the_results(interrupted, new_record, monkeypatch):
    """For example, they are on another disk, which is mounted read-only."""

    def refuse(checkpoint: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(checkpoint))

    (interrupted.folder / METRICS.name).write_text("{}")
    before = contents(interrupted.folder)
    monkeypatch.setattr(folder_module, "remove", refuse)
    record, plan = new_record(resume_at(interrupted, 5))
    begin(record, plan)
    with pytest.raises(UserError, match=r"run/checkpoints/checkpoint-10: cannot be written: Read-only file system"):
        add_steps(record, 6)
    assert contents(interrupted.folder) == before


def test_a_run_without_further_steps_replaces_only_its_results(interrupted, new_record, monkeypatch):
    before = contents(interrupted.folder)
    record, plan = new_record(replace(resume_at(interrupted, 10), lock=interrupted.run_folder.lock), max_steps=10)
    interrupted.run_folder.lock = None
    begin(record, plan)
    assert contents(interrupted.folder) == before
    monkeypatch.setattr(record_module, "write_results", lambda *_, **__: None)
    record.finish(Copies(), nn.Linear(2, 2), tokenizer=None, **correct_predictions(record))
    assert not (record.folder / METRICS.name).exists()
    assert steps_on_disk(record) == list(range(1, 11))


def test_the_best_weights_of_a_repeated_evaluation_are_those_before_the_next_step(new_record, fill):
    flags = BEST | {"eval_strategy": "steps", "eval_steps": 5}
    first, plan = new_record(**flags)
    begin(first, plan)
    add_steps(first, *range(1, 6))
    first.save_checkpoint(5, fill)
    first.run_folder.unlock()
    record, plan = new_record(resume_at(first, 5), **flags)
    assert begin(record, plan)
    model, before = nn.Linear(2, 2), nn.Linear(2, 2)
    before.load_state_dict(model.state_dict())
    record.best.keep(5, References(), model, metrics={"accuracy": 0.5})
    assert best_folders(record) == []
    record.best.load(model, record.steps.last_step)
    assert torch.equal(model.weight, before.weight), "without a further step, the model has them"
    with torch.no_grad():
        model.weight += 1  # the next step
    add_steps(record, 6)
    assert best_folders(record) == ["best-5"]
    record.best.load(model, record.steps.last_step)
    assert torch.equal(model.weight, before.weight)


@pytest.mark.parametrize(("eval_strategy", "is_repeated"), [("steps", True), ("no", False)])
def test_the_evaluation_after_a_checkpoint_is_repeated(interrupted, new_record, eval_strategy, is_repeated):
    record, plan = new_record(resume_at(interrupted, 10), eval_strategy=eval_strategy, eval_steps=5)
    assert begin(record, plan) is is_repeated
    add_steps(record, 11)
    assert evaluations_on_disk(record) == ([5] if is_repeated else [5, 10])


@pytest.mark.parametrize("lost", [[], [5], [10], [5, 10]])
def test_a_lost_evaluation_is_noticed(new_record, fill, lost):
    record, plan = new_record(eval_strategy="steps", eval_steps=5, save_total_limit=9)
    begin(record, plan)
    for step in (5, 10, 15):
        add_steps(record, *range(step - 4, step + 1))
        record.save_checkpoint(step, fill)
        record.write_evaluation(step, "test", {"n": 12, "accuracy": 0.5, "f1": 0.5, "loss": 0.7})
    record.run_folder.unlock()
    log = record.folder / EVALUATIONS.name
    kept = [line for line in log.read_text().splitlines(keepends=True) if json.loads(line)["step"] not in lost]
    log.write_text("".join(kept))
    for step in (5, 10, 15):
        resume = resume_at(record, step)
        if any(gone < step for gone in lost):
            with pytest.raises(UserError, match=rf"lacks evaluations before .*checkpoint-{step},"):
                resume.lines_of(EVALUATIONS.name)
        else:  # the run repeats the evaluation after the checkpoint's own step
            assert len(resume.lines_of(EVALUATIONS.name, before=step)) == step // 5 - 1


def test_a_folder_that_can_no_longer_be_written_is_a_one_line_error(interrupted, new_record, monkeypatch):
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(UserError, match=r"--output_dir .*run: cannot be written: Read-only file system"):
        new_record(resume_at(interrupted, 10))


def test_a_restarted_job_never_finds_a_later_checkpoint_than_the_one_it_resumes_from(
    interrupted, new_record, monkeypatch
):
    """The job recognizes its folder by settings.json; if it is killed before that, it follows the request again."""
    write_json = folder_module.write_json

    def write_and_check(path: Path, content: object) -> None:
        if path.name == SETTINGS.name:
            assert sorted(p.name for p in interrupted.checkpoints.folder.iterdir()) == ["checkpoint-5"]
        write_json(path, content)

    monkeypatch.setattr(folder_module, "write_json", write_and_check)
    record, plan = new_record(resume_at(interrupted, 5))
    begin(record, plan)
    add_steps(record, 6)


def test_a_new_run_evaluates_nothing_at_its_start(new_record):
    record, plan = new_record()
    assert begin(record, plan) is False


def test_latest_points_only_to_a_run_that_auto_can_find(new_record, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    latest = tmp_path / RUNS / "ddp_loop" / LATEST
    record, plan = new_record(output_dir=None)
    assert not latest.exists()
    begin(record, plan)
    assert (latest / SETTINGS.name).is_file()


def test_the_folder_records_who_started_the_job(new_record):
    record, plan = new_record(Resume(launchers=["host:1:2.00"]))
    begin(record, plan)
    assert json.loads((record.folder / SETTINGS.name).read_text())["launchers"] == ["host:1:2.00"]


@pytest.mark.parametrize(("saved", "outcome"), [(6, Preempted), (5, RunError), (None, RunError)])
def test_a_stop_without_its_checkpoint_is_a_failure(new_record, saved, outcome):
    record, plan = new_record()
    begin(record, plan)
    record.checkpoints.latest_valid = record.checkpoints.folder / f"checkpoint-{saved}" if saved else None
    stop = record.preempted(6)
    assert type(stop) is outcome
    assert "after step 6 of 20" in str(stop)


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_a_finished_run_unlocks_its_folder(new_record, monkeypatch):
    record, plan = new_record()
    begin(record, plan)
    add_steps(record, 1)
    monkeypatch.setattr(record_module, "write_results", lambda *_, **__: "f" * 64)
    with pytest.raises(UserError, match="has not ended"):
        lock(record.folder)
    record.finish(Copies(), nn.Linear(2, 2), tokenizer=None, **correct_predictions(record))
    os.close(lock(record.folder))
