"""A run's folder: what all nodes must see."""

from __future__ import annotations

import pytest

from app.common.errors import UserError
from app.distributed.collectives import all_gather_object
from app.training import prepare as prepare_module


@pytest.mark.parametrize("strategy", ["steps", "no"])
def test_a_folder_that_another_rank_can_not_see_is_refused_if_checkpoints_are_written(
    new_record,
    monkeypatch,
    tmp_path,
    strategy,
):
    def seen_by_one(value, world):
        return [value, False] if isinstance(value, bool) else all_gather_object(value, world)

    monkeypatch.setattr(prepare_module, "all_gather_object", seen_by_one)
    if strategy == "no":
        new_record(save_strategy="no")
        return
    with pytest.raises(UserError, match=r"--output_dir .*run: rank\(s\) 1 cannot see it"):
        new_record()
    assert not (tmp_path / "run").exists()
