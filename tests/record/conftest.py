"""Fixtures that open run records without training."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from record.run_records import begin

from app.checkpoint.resume import Resume
from app.data.split import count_duplicates
from app.distributed.collectives import gather_arithmetic
from app.record.run_record import RunRecord
from app.settings import Settings
from app.strategies.optimization import mean_loss
from app.training.build import read_and_split, select_strategy
from app.training.prepare import Preparation, open_folder

SMALL = {"train_batch_size": 4, "max_steps": 20, "save_strategy": "steps", "save_steps": 5}


@pytest.fixture
def started(world, tmp_path, review_csv) -> Callable[..., RunRecord]:
    """Open a run with these settings, which has neither tokens nor a model, and begin it unless `begun` is False."""

    def start(resume: Resume | None = None, begun: bool = True, **changes: Any) -> RunRecord:
        places = {"csv": str(review_csv()), "output_dir": str(tmp_path / "run")}
        settings, resume = Settings(**places | SMALL | changes), resume or Resume()
        table, split, plan = read_and_split(settings, 1)
        folder, lock = open_folder("ddp_loop", settings, resume, world=world)
        data = SimpleNamespace(table=table, split=split, plan=plan, duplicates=count_duplicates(table, split))
        data.tokenizer, data.rows_of_step = None, lambda logical_ranks, settings, step: [7, 9]
        parts: dict[str, Any] = {"settings": settings, "world": world, "data": data, "resume": resume}
        parts |= {"folder": folder, "lock": lock, "model": torch.nn.Linear(2, 2), "loss": mean_loss}
        parts |= {"strategy": select_strategy(settings, plan, world), "arithmetic": gather_arithmetic(world)}
        identity = dict.fromkeys(("model_commit", "model_config", "model_code_sha256", "tokens_sha256"))
        run = Preparation(path_name="ddp_loop", devices=["cpu"], identity=identity, **parts)
        record = RunRecord(run)
        if begun:
            begin(record)
        return record

    return start
