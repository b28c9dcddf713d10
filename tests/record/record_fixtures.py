"""Fixtures that open run records without training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.checkpoint.resume import Resume
from app.data.sampler import BatchPlan
from app.data.split import count_duplicates
from app.distributed.collectives import gather_arithmetic
from app.distributed.world import World
from app.record.run_record import RunRecord
from app.settings import Settings
from app.strategies.optimization import mean_loss
from app.training.build import read_and_split, select_strategy
from app.training.prepare import Preparation, open_folder

SMALL = {"train_batch_size": 4, "max_steps": 20, "save_strategy": "steps", "save_steps": 5}


def prepare_without_model(settings: Settings, world: World, resume: Resume) -> Preparation:
    """Prepare a run that has neither tokens nor a model."""
    table, split, plan = read_and_split(settings, 1)
    folder, lock = open_folder("ddp_loop", settings, resume, world=world)
    data: Any = SimpleNamespace(
        table=table,
        split=split,
        plan=plan,
        tokenizer=None,
        duplicates=count_duplicates(table, split),
        rows_of_step=lambda logical_ranks, settings, step: [7, 9],
    )
    model: Any = torch.nn.Linear(2, 2)
    return Preparation(
        path_name="ddp_loop",
        settings=settings,
        world=world,
        data=data,
        model=model,
        identity=dict.fromkeys(("model_commit", "model_config", "model_code_sha256", "tokens_sha256")),
        strategy=select_strategy(settings, plan, world),
        loss=mean_loss,
        resume=resume,
        folder=folder,
        lock=lock,
        devices=["cpu"],
        arithmetic=gather_arithmetic(world),
    )


@pytest.fixture
def new_record(world, tmp_path, review_csv) -> Iterator[Callable[..., tuple[RunRecord, BatchPlan]]]:
    """Open a run with these settings. Returns its record and its batch plan."""
    records = []

    def create(resume: Resume | None = None, **settings) -> tuple[RunRecord, BatchPlan]:
        places = {"csv": str(review_csv()), "output_dir": str(tmp_path / "run")}
        mine = Settings(**places | SMALL | settings)
        run = prepare_without_model(mine, world, resume or Resume())
        record = RunRecord(run)
        records.append(record)
        return record, run.plan

    yield create
    for record in records:
        record.unlock()
