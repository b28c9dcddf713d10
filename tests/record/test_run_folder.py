"""A run's folder: what all nodes must see, what is copied into it, and the peak of the devices."""

from __future__ import annotations

import pytest

from app.checkpoint.manager import commit_checkpoint, problem_of
from app.common.errors import UserError
from app.distributed.collectives import all_gather_object
from app.record import run_folder as folder_module
from app.record.run_folder import copy_best
from app.runs.schema import CHECKPOINTS


@pytest.mark.parametrize("strategy", ["steps", "no"])
def test_a_folder_that_another_rank_can_not_see_is_refused_if_checkpoints_are_written(
    new_record, monkeypatch, tmp_path, strategy
):
    def seen_by_one(value, world):
        return [value, False] if isinstance(value, bool) else all_gather_object(value, world)

    monkeypatch.setattr(folder_module, "all_gather_object", seen_by_one)
    if strategy == "no":
        new_record(save_strategy="no")
        return
    with pytest.raises(UserError, match=r"--output_dir .*run: rank\(s\) 1 cannot see it"):
        new_record()
    assert not (tmp_path / "run").exists()


def test_the_best_weights_need_a_shared_folder_too(new_record, monkeypatch):
    monkeypatch.setattr(folder_module, "_reject_unshared_folder", lambda *_, **__: pytest.fail("checked"))
    new_record(save_strategy="no")
    with pytest.raises(pytest.fail.Exception, match="checked"):
        new_record(save_strategy="no", output_dir=None, load_best_model_at_end=True, validation_size=0.2)


def test_best_weights_of_another_run_are_copied_and_remain_valid(tmp_path):
    source = tmp_path / "old" / CHECKPOINTS / "best-3"
    staging = tmp_path / "old" / CHECKPOINTS / ".writing" / "best-3"
    staging.mkdir(parents=True)
    (staging / "weights").write_text("1")
    commit_checkpoint(staging, source)
    run = tmp_path / "new"
    run.mkdir()
    copy_best(source, run)
    assert problem_of(run / CHECKPOINTS / "best-3") is None
    assert problem_of(source) is None
    assert [path.name for path in run.iterdir()] == [CHECKPOINTS]


def test_best_weights_that_another_job_has_removed_are_named(tmp_path):
    with pytest.raises(UserError, match="best-3: has been removed since this run was started"):
        copy_best(tmp_path / "old" / CHECKPOINTS / "best-3", tmp_path)


def test_best_weights_are_not_copied_onto_themselves(tmp_path):
    folder = tmp_path / CHECKPOINTS / "best-3"
    folder.mkdir(parents=True)
    (folder / "weights").write_text("1")
    copy_best(folder, tmp_path)
    copy_best(None, tmp_path)
    assert (folder / "weights").read_text() == "1"
