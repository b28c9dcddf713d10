"""Fixtures that open run records without training."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from app.checkpoint.resume import Resume
from app.data.sampler import BatchPlan
from app.data.split import count_duplicates
from app.model.identity import ModelIdentity
from app.record.run_folder import RunInfo, open_run
from app.record.run_record import RunRecord
from app.settings import Settings
from app.training.build import read_and_split

SMALL = {"train_batch_size": 4, "max_steps": 20, "save_strategy": "steps", "save_steps": 5}


@pytest.fixture
def new_record(world, tmp_path, review_csv) -> Iterator[Callable[..., tuple[RunRecord, BatchPlan]]]:
    """Open a run with these settings. Returns its record and its batch plan."""
    records = []

    def create(resume: Resume | None = None, **settings) -> tuple[RunRecord, BatchPlan]:
        places = {"csv": str(review_csv()), "output_dir": str(tmp_path / "run")}
        mine = Settings(**places | SMALL | settings)
        table, split, plan = read_and_split(mine, 1)
        info = RunInfo(
            path_name="ddp_loop",
            settings=mine,
            table=table,
            split=split,
            duplicates=count_duplicates(table, split),
            world=world,
            model=ModelIdentity(),
            plan=plan,
            rows_of_step=lambda step: [step],
            resume=resume or Resume(),
        )
        record = RunRecord(open_run(info))
        records.append(record)
        return record, plan

    yield create
    for record in records:
        record.unlock()
