"""The best weights: what counts as better, and which are kept."""

from __future__ import annotations

import pytest

from app.record.best import Best, remove_unused_best
from app.runs.schema import RUN_STATE


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


@pytest.mark.parametrize("content", ["[]", '{"best": null}', "{", pytest.param("[" * 100_000, id="nested too deeply")])
def test_a_damaged_checkpoint_keeps_no_best_weights_from_being_removed(tmp_path, content):
    for name in ("best-3", "best-5", "best-7", "checkpoint-6", "checkpoint-8"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-6" / RUN_STATE).write_text('{"best": {"step": 5}}')
    (tmp_path / "checkpoint-8" / RUN_STATE).write_text(content)
    remove_unused_best(tmp_path, Best(7))
    assert sorted(path.name for path in tmp_path.glob("best-*")) == ["best-5", "best-7"]
