"""The best weights: what counts as better, and how a new run gets those of another run."""

from __future__ import annotations

import pytest

from app.checkpoint.manager import commit_checkpoint, problem_of
from app.common.errors import UserError
from app.record.best import Best, remove_unused_best
from app.record.reset import copy_best
from app.runs.schema import CHECKPOINTS, RUN_STATE


@pytest.mark.parametrize(
    ("best", "value", "metric", "is_improved"),
    [
        (None, 0.1, "accuracy", True),
        (0.5, 0.6, "accuracy", True),
        (0.5, 0.5, "accuracy", False),
        (0.5, 0.4, "f1", False),
        (0.5, 0.4, "loss", True),
        (0.5, 0.5, "loss", False),
        (0.5, 0.6, "loss", False),
    ],
)
def test_only_a_strictly_better_value_is_an_improvement(best, value, metric, is_improved):
    assert Best(1, best).is_improved_by(value, metric) is is_improved


def test_best_weights_of_another_run_are_copied_and_remain_valid(tmp_path):
    source = tmp_path / "old" / CHECKPOINTS / "best-3"
    staging = tmp_path / "old" / CHECKPOINTS / ".writing" / "best-3"
    staging.mkdir(parents=True)
    (staging / "weights").write_text("1")
    commit_checkpoint(staging, source)
    run = tmp_path / "new"
    run.mkdir()
    copy_best(source, run, run / CHECKPOINTS)
    assert problem_of(run / CHECKPOINTS / "best-3") is None
    assert problem_of(source) is None
    assert [path.name for path in run.iterdir()] == [CHECKPOINTS]


def test_best_weights_that_another_job_has_removed_are_named(tmp_path):
    with pytest.raises(UserError, match="best-3: has been removed since this run was started"):
        copy_best(tmp_path / "old" / CHECKPOINTS / "best-3", tmp_path, tmp_path / CHECKPOINTS)


def test_best_weights_are_not_copied_onto_themselves(tmp_path):
    folder = tmp_path / CHECKPOINTS / "best-3"
    folder.mkdir(parents=True)
    (folder / "weights").write_text("1")
    copy_best(folder, tmp_path, tmp_path / CHECKPOINTS)
    copy_best(None, tmp_path, tmp_path / CHECKPOINTS)
    assert (folder / "weights").read_text() == "1"


@pytest.mark.parametrize("content", ["[]", '{"best": null}', "{", pytest.param("[" * 100_000, id="nested too deeply")])
def test_a_damaged_checkpoint_keeps_no_best_weights_from_being_removed(tmp_path, content):
    for name in ("best-3", "best-5", "best-7", "checkpoint-6", "checkpoint-8"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-6" / RUN_STATE).write_text('{"best": {"step": 5}}')
    (tmp_path / "checkpoint-8" / RUN_STATE).write_text(content)
    remove_unused_best(tmp_path, Best(7))
    assert sorted(path.name for path in tmp_path.glob("best-*")) == ["best-5", "best-7"]
