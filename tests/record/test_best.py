"""The best weights: what counts as better, which are kept, and what another run takes over."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from record.conftest import SCORES, do_steps, files_up_to

from app.common.errors import RunError, UserError
from app.record.run_record import RunRecord
from app.runs.schema import SETTINGS

BEST = {"validation_size": 0.2, "eval_strategy": "epoch", "load_best_model_at_end": True}


def folders(record: RunRecord) -> list[str]:
    return sorted(path.name for path in record.checkpoints.folder.glob("best-*"))


def weights(record: RunRecord) -> torch.Tensor:
    return next(record.run.model.parameters()).data


def evaluate(record: RunRecord, step: int, value: float, metric: str = "accuracy") -> None:
    """Record an evaluation, of weights that are equal to its value."""
    weights(record).fill_(value)
    record.after_evaluation(step, "validation", SCORES | {metric: value})


def loaded(record: RunRecord) -> list[float]:
    """Load the best weights, and return their different values."""
    record.best.load(record.state)
    return weights(record).unique().tolist()


@pytest.mark.parametrize(
    ("values", "metric", "best"),
    [
        ([0.5, 0.75, 0.75], "accuracy", "best-2"),
        ([0.5, 0.25], "f1", "best-1"),
        ([0.5, 0.25, 0.25, 0.75], "loss", "best-2"),
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
    evaluate(record, 1, 0.25)
    do_steps(record, 5)
    evaluate(record, 6, 0.5)
    evaluate(record, 7, 0.75)
    assert folders(record) == ["best-1", "best-7"]  # checkpoint-5 resumes with best-1
    do_steps(record, 5)
    assert folders(record) == ["best-7"]


def test_weights_that_could_not_be_saved_are_not_the_best(started):
    record = started(**BEST)
    evaluate(record, 1, 0.5)
    with files_up_to(0):
        evaluate(record, 2, 0.75)
    assert loaded(record) == [0.5]
    do_steps(record, 5)
    os.close(record.run.lock)
    resumed = started(**BEST, resume_from_checkpoint="auto")
    assert resumed.best.best().name == "best-1", "as before it was interrupted"


def test_best_weights_are_taken_over_from_another_run_unless_they_are_damaged(started, tmp_path, monkeypatch):
    other = started(**BEST)
    do_steps(other, 4)
    evaluate(other, 4, 0.5)
    do_steps(other)

    def start(name: str) -> RunRecord:
        checkpoint = str(other.checkpoints.folder / "checkpoint-5")
        return started(**BEST, resume_from_checkpoint=checkpoint, output_dir=str(tmp_path / name))

    with monkeypatch.context() as patch:
        patch.delattr(shutil, "copytree")
        with pytest.raises(AttributeError):
            start("killed")
    assert (tmp_path / "killed" / SETTINGS.name).exists(), "when it is restarted, it recognizes its folder"
    new = start("new")
    weights(new).fill_(0.25)
    assert (folders(new), loaded(new)) == (["best-4"], [0.5])
    (other.checkpoints.folder / "best-4" / "state-0-of-1.safetensors").write_bytes(b"")
    with pytest.raises(RunError, match=r"best-4: the best weights are damaged: .* has changed"):
        loaded(other)
    with pytest.raises(UserError, match=r"best-4, the best weights before it: .* has changed"):
        start("rejected")
    assert not [*(tmp_path / "rejected").rglob("*.json")]
