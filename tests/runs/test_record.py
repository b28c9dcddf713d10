"""What a run's folder holds at any moment: nothing is removed too early, and nothing is lost on a full disk."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from app import files
from app.distributed.collectives import all_gather_object
from app.errors import UserError
from app.metrics.score import score
from app.model.load import load_classifier, load_tokenizer
from app.runs.metrics_log import MetricsLog
from app.runs.record import RunRecord
from app.runs.resume import CHECKPOINT_FILES, Resume
from app.settings import Settings
from app.training.build import read_and_split

SMALL = {"train_batch_size": 4, "max_steps": 20, "save_strategy": "steps", "save_steps": 5}
BEST = {"validation_size": 0.2, "load_best_model_at_end": True}


@pytest.fixture
def new_record(world, tmp_path, review_csv):
    """Creates the record of a run, and the plan of its batches."""
    held = []

    def create(resume: Resume | None = None, folder: str = "run", **settings):
        places = {"csv": str(review_csv()), "output_dir": str(tmp_path / folder)}
        mine = Settings(**places | SMALL | settings)
        table, split, plan = read_and_split(mine, 1)
        record = RunRecord("ddp_loop", mine, table, split, world, resume or Resume(), lambda step: [step])
        held.append(record)
        return record, plan

    yield create
    for record in held:
        if record.lock is not None:
            os.close(record.lock)


def fill(folder: Path) -> None:
    for name in CHECKPOINT_FILES[:-1]:
        (folder / name).write_text(name)


def add_steps(record: RunRecord, *steps: int) -> None:
    for step in steps:
        batch = dict.fromkeys(("input_ids", "attention_mask"), torch.ones(4, 3, dtype=torch.int64))
        record.add_step(step, step / 10, torch.tensor(0.5), torch.tensor(1.0), 1e-3, [batch])
    record.write_steps()


def steps_on_disk(record: RunRecord) -> list[int]:
    return [json.loads(line)["step"] for line in (record.folder / "steps.jsonl").read_text().splitlines()]


def bests(record: RunRecord) -> list[str]:
    return sorted(path.name for path in record.checkpoints.folder.glob("best-*"))


# ---- the best weights ------------------------------------------------------------------------------------------------


def test_without_checkpoints_only_the_best_weights_so_far_are_kept(new_record):
    record, plan = new_record(**BEST | {"save_strategy": "no"})
    record.begin(plan)
    model = nn.Linear(2, 2)
    for step, accuracy in enumerate([0.5, 0.6, 0.6, 0.7, 0.65, 0.8], start=1):
        record.keep_best(step, model, {"accuracy": accuracy})
        assert bests(record) == [f"best-{record.best.step}"]
    assert bests(record) == ["best-6"]


def test_best_weights_that_a_checkpoint_needs_are_kept_with_it(new_record):
    record, plan = new_record(**BEST | {"save_total_limit": 1})
    record.begin(plan)
    model = nn.Linear(2, 2)
    record.keep_best(1, model, {"accuracy": 0.5})
    add_steps(record, *range(1, 6))
    record.save_checkpoint(5, plan, fill)
    record.keep_best(6, model, {"accuracy": 0.6})
    record.keep_best(7, model, {"accuracy": 0.7})
    assert bests(record) == ["best-1", "best-7"]  # checkpoint-5 resumes with best-1
    add_steps(record, *range(6, 11))
    record.save_checkpoint(10, plan, fill)
    assert bests(record) == ["best-7"]


# ---- a full disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(monkeypatch):
    """A disk that can be filled: `disk["full"] = True`."""
    state = {"full": False}
    append = MetricsLog.append

    def append_if_there_is_room(self: MetricsLog, lines: str) -> None:
        if state["full"]:
            self.pending += lines.encode()
            if self.pending:
                raise OSError(errno.ENOSPC, "No space left on device")
        append(self, lines)

    monkeypatch.setattr(MetricsLog, "append", append_if_there_is_room)
    return state


def test_training_continues_on_a_full_disk_and_no_line_is_missing_later(new_record, disk, capsys):
    record, plan = new_record()
    record.begin(plan)
    add_steps(record, 1, 2)
    disk["full"] = True
    add_steps(record, 3)
    add_steps(record, 4, 5)
    assert steps_on_disk(record) == [1, 2]
    record.save_checkpoint(5, plan, fill)
    assert record.checkpoints.latest_valid is None, "a checkpoint without its log lines can't be resumed"
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 2
    assert "steps.jsonl could not be written: No space left on device" in warnings[0]
    assert "checkpoint-5 could not be written" in warnings[1]
    disk["full"] = False
    add_steps(record, 6)
    assert steps_on_disk(record) == [1, 2, 3, 4, 5, 6]
    record.save_checkpoint(6, plan, fill)
    assert record.checkpoints.latest_valid == record.checkpoints.folder / "checkpoint-6"


@pytest.mark.parametrize("gone", [False, True])
def test_a_run_that_is_to_stop_or_whose_folder_is_gone_does_not_continue(new_record, disk, gone):
    record, plan = new_record(on_save_failure="continue" if gone else "stop")
    record.begin(plan)
    disk["full"] = True
    if gone:
        record.folder.rename(record.folder.with_name("elsewhere"))
    with pytest.raises(OSError, match="No space left"):
        add_steps(record, 1)


# ---- resuming --------------------------------------------------------------------------------------------------------


@pytest.fixture
def interrupted(new_record):
    """A run with checkpoints after steps 5 and 10 and an evaluation at each; killed after step 12."""
    record, plan = new_record(eval_strategy="steps", eval_steps=5)
    record.begin(plan)
    for step in (5, 10):
        add_steps(record, *range(step - 4, step + 1))
        record.save_checkpoint(step, plan, fill)
        record.write_evaluation(step, 0.1, "test", 12, {"accuracy": 0.5, "f1": 0.5, "loss": 0.7})
    add_steps(record, 11, 12)
    (record.folder / "metrics.json").write_text("{}")
    return record


def resume_at(record: RunRecord, step: int) -> Resume:
    checkpoint = record.checkpoints.folder / f"checkpoint-{step}"
    return Resume(record.folder, checkpoint, json.loads((checkpoint / "run_state.json").read_text()))


def test_nothing_is_removed_before_the_training_state_has_been_loaded(interrupted, new_record):
    before = {path: path.read_bytes() for path in interrupted.folder.rglob("*") if path.is_file()}
    record, plan = new_record(resume_at(interrupted, 5), eval_strategy="steps", eval_steps=5)
    assert {path: path.read_bytes() for path in interrupted.folder.rglob("*") if path.is_file()} == before
    record.begin(plan)
    assert sorted(path.name for path in record.checkpoints.folder.iterdir()) == ["checkpoint-5"]
    assert steps_on_disk(record) == [1, 2, 3, 4, 5]
    assert not (record.folder / "metrics.json").exists()


@pytest.mark.parametrize(("eval_strategy", "repeated"), [("steps", True), ("no", False)])
def test_the_evaluation_that_follows_a_checkpoint_is_repeated(interrupted, new_record, eval_strategy, repeated):
    record, plan = new_record(resume_at(interrupted, 10), eval_strategy=eval_strategy, eval_steps=5)
    assert record.begin(plan) is repeated
    lines = (record.folder / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == ([5] if repeated else [5, 10])


def test_a_folder_that_can_not_be_written_any_more_is_one_line(interrupted, new_record, monkeypatch):
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(UserError, match=r"--output_dir .*run: can't be written: Read-only file system"):
        new_record(resume_at(interrupted, 10))


def test_a_restarted_job_never_finds_a_later_checkpoint_than_the_one_it_resumes_from(
    interrupted, new_record, monkeypatch
):
    """settings.json makes the folder its own; if it is killed before that, the request is followed again."""
    from app.runs import record as run_record

    write_json = run_record.write_json

    def write_and_look(path: Path, content: object) -> None:
        if path.name == "settings.json":
            assert sorted(p.name for p in interrupted.checkpoints.folder.iterdir()) == ["checkpoint-5"]
        write_json(path, content)

    monkeypatch.setattr(run_record, "write_json", write_and_look)
    record, plan = new_record(resume_at(interrupted, 5))
    record.begin(plan)


def test_a_new_run_evaluates_nothing_at_its_start(new_record):
    record, plan = new_record()
    assert record.begin(plan) is False


def test_latest_points_only_to_a_run_that_auto_can_find(new_record, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    latest = tmp_path / "runs" / "ddp_loop" / "latest"
    record, plan = new_record(output_dir=None)
    assert not latest.exists()
    record.begin(plan)
    assert (latest / "settings.json").is_file()


def test_a_model_that_can_not_be_written_is_one_line_and_leaves_nothing(new_record):
    class Model(nn.Linear):
        def save_pretrained(self, folder: Path) -> None:
            (folder / "half").touch()
            raise SafetensorError("I/O error: No space left on device")

        def num_parameters(self, exclude_embeddings: bool) -> int:
            return 1

    record, plan = new_record()
    record.begin(plan)
    add_steps(record, 1)
    labels = record.table.labels[record.split.test]
    logits = torch.nn.functional.one_hot(torch.from_numpy(labels), 2).double().numpy()
    with pytest.raises(OSError, match="model could not be written: I/O error: No space left"):
        record.finish(Model(2, 2), None, logits, score(logits, labels))
    assert not (record.folder / ".model.tmp").exists()


def test_the_folder_records_who_started_the_job(new_record):
    record, plan = new_record(Resume(launchers=["host:1:2.00"]))
    record.begin(plan)
    assert json.loads((record.folder / "settings.json").read_text())["launchers"] == ["host:1:2.00"]


# ---- the results -----------------------------------------------------------------------------------------------------


def test_everything_else_is_on_disk_before_metrics_json_marks_the_run_finished(new_record, monkeypatch):
    record, plan = new_record(max_length=16)
    record.begin(plan)
    add_steps(record, 1)
    done: list[tuple[str, str]] = []
    flush, replace = files.flush, os.replace
    for module in (files, __import__("app.runs.record", fromlist=["flush"])):
        monkeypatch.setattr(module, "flush", lambda path: (done.append(("flush", path.name)), flush(path)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append(("rename", Path(b).name)), replace(a, b)))
    tokenizer = load_tokenizer(record.settings, record.table.texts)
    model = load_classifier(record.settings, record.table.class_names, tokenizer).model
    labels = record.table.labels[record.split.test]
    logits = torch.nn.functional.one_hot(torch.from_numpy(labels), 2).double().numpy()
    record.finish(model, tokenizer, logits, score(logits, labels))
    renames = [name for what, name in done if what == "rename"]
    assert renames == ["model", "predictions.csv", "metrics.json"]
    for name, files_of_it in (("model", {"model.safetensors", "config.json"}), ("predictions.csv", set())):
        place = done.index(("rename", name))
        flushed = {flushed for what, flushed in done[:place] if what == "flush"}
        assert files_of_it <= flushed
        assert done[place + 1] == ("flush", "run")
    assert ("flush", "steps.jsonl") in done[: done.index(("rename", "model"))]
    assert done[-1] == ("flush", "run")


def test_a_run_folder_that_is_gone_is_not_created_for_the_results(new_record):
    record, plan = new_record()
    record.begin(plan)
    add_steps(record, 1)
    record.folder.rename(record.folder.with_name("elsewhere"))
    labels = record.table.labels[record.split.test]
    logits = torch.nn.functional.one_hot(torch.from_numpy(labels), 2).double().numpy()
    with pytest.raises(FileNotFoundError):
        record.finish(nn.Linear(2, 2), None, logits, score(logits, labels))
    assert not record.folder.exists()


# ---- a folder that not all nodes see ---------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["steps", "no"])
def test_a_folder_that_another_rank_can_not_see_is_refused_if_checkpoints_are_to_be_written(
    new_record, monkeypatch, tmp_path, strategy
):
    from app.runs import record as run_record

    def seen_by_two(value, world):
        return [value, False] if isinstance(value, bool) else all_gather_object(value, world)

    monkeypatch.setattr(run_record, "all_gather_object", seen_by_two)
    if strategy == "no":
        new_record(save_strategy="no")
        return
    with pytest.raises(UserError, match=r"--output_dir .*run: rank\(s\) 1 can't see it"):
        new_record()
    assert not (tmp_path / "run").exists()
