"""A run that is prepared as both training paths do, whose steps the tests make up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from record.run_records import begin

from app.record.run_record import RunRecord
from app.settings import Settings
from app.training.prepare import prepare

SMALL = {"train_batch_size": 4, "max_steps": 20, "max_length": 16, "logging_steps": 1, "use_cpu": True}
SMALL |= {"eval_strategy": "no", "save_strategy": "steps", "save_steps": 5, "disable_tqdm": True}


@pytest.fixture
def started(world, tmp_path, review_csv, capsys) -> Callable[..., RunRecord]:
    """Prepare a run with these settings, and begin its record unless `begun` is False."""

    def start(begun: bool = True, **changes: Any) -> RunRecord:
        places = {"csv": str(review_csv()), "output_dir": str(tmp_path / "run"), "cache_dir": str(tmp_path / "cache")}
        record = RunRecord(prepare("ddp_loop", Settings(**places | SMALL | changes), world))
        capsys.readouterr()  # what `prepare` has printed
        if begun:
            begin(record)
        return record

    return start
