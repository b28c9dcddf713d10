"""The best weights: what counts as better, which are kept, and what another run takes over."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import pytest
from record.run_records import SCORES, add_steps, resume_at

from app.common.errors import RunError, UserError
from app.record.run_record import RunRecord
from app.runs.schema import SCHEDULE, SETTINGS

BEST = {"validation_size": 0.2, "load_best_model_at_end": True}


def folders(record: RunRecord) -> list[str]:
    return sorted(path.name for path in record.checkpoints.folder.glob("best-*"))


def evaluate(record: RunRecord, step: int, value: float, metric: str = "accuracy") -> None:
    record.after_evaluation(step, "validation", SCORES | {metric: value})


@pytest.mark.parametrize(
    ("values", "metric", "best"),
    [
        ([0.5, 0.6, 0.6], "accuracy", "best-2"),
        ([0.5, 0.4], "f1", "best-1"),
        ([0.5, 0.4, 0.4, 0.6], "loss", "best-2"),
        ([], "loss", None),
    ],
)
def test_only_a_strictly_better_value_is_an_improvement(started, values, metric, best):
    record = started(**BEST, metric_for_best_model=metric)
    for step, value in enumerate(values, start=1):
        evaluate(record, step, value, metric)
    folder = record.checkpoints.folder
    assert record.best.best() == (folder / best if best else None)
    assert record.best.best(up_to=1) == (folder / "best-1" if best else None)


def test_best_weights_that_a_checkpoint_needs_are_kept_with_it(started):
    record = started(**BEST, save_total_limit=1)
    evaluate(record, 1, 0.5)
    add_steps(record, *range(1, 6))
    record.save_checkpoint(5)
    evaluate(record, 6, 0.6)
    evaluate(record, 7, 0.7)
    assert folders(record) == ["best-1", "best-7"]  # checkpoint-5 resumes with best-1
    add_steps(record, *range(6, 11))
    record.save_checkpoint(10)
    assert folders(record) == ["best-7"]


def test_weights_that_could_not_be_saved_are_not_the_best(started, monkeypatch):
    record = started(**BEST)
    evaluate(record, 1, 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(record.checkpoints, "save", lambda *_: False)  # the disk is full
        evaluate(record, 2, 0.6)
    record.best.load(record.state)
    assert [folder.name for folder in record.state.loaded] == ["best-1"]
    add_steps(record, *range(1, 6))
    record.save_checkpoint(5)
    os.close(record.run.lock)
    assert started(resume_at(record, 5), **BEST).best.best().name == "best-1", "as before it was interrupted"


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_run_that_starts_from_another_one_takes_over_its_best_weights(started, tmp_path, monkeypatch, is_damaged):
    record, place = started(**BEST), tmp_path / "other"
    add_steps(record, *range(1, 6))
    evaluate(record, 4, 0.5)
    record.save_checkpoint(5)
    resume = replace(resume_at(record, 5), folder=None)
    if is_damaged:
        (record.checkpoints.folder / "best-4" / SCHEDULE).write_text("[]")
        with pytest.raises(RunError, match=r"best-4: the best weights are damaged: .* has changed"):
            record.best.load(record.state)
        with pytest.raises(UserError, match=r"best-4, the best weights before it: schedule.json has changed"):
            started(resume, **BEST, output_dir=str(place))
        assert not list(place.rglob("*.json"))
        return
    with monkeypatch.context() as patch:
        patch.delattr(shutil, "copytree")
        with pytest.raises(AttributeError):
            started(resume, **BEST, output_dir=str(place))
    assert (place / SETTINGS.name).exists(), "a job that is killed now, and restarted, recognizes its folder"
    other = started(resume, **BEST, output_dir=str(tmp_path / "another"))
    assert folders(other) == ["best-4"]
    other.best.load(other.state)
    assert other.state.loaded == [other.checkpoints.folder / "best-4"]
