"""Runs that are prepared as both training paths do, whose steps the tests make up, and full disks."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.bench.steps import Bench
from app.checkpoint.state import TrainingState
from app.metrics.score import score
from app.record.run_record import RunRecord
from app.runs.schema import STEPS
from app.settings import Settings
from app.training.prepare import prepare

SMALL = {"train_batch_size": 4, "max_steps": 20, "max_length": 16, "logging_steps": 1, "use_cpu": True}
SMALL |= {"eval_strategy": "no", "save_strategy": "steps", "save_steps": 5, "disable_tqdm": True}
SCORES = {"n": 12, "accuracy": 0.5, "f1": 0.5, "loss": 0.7}


def begin(record: RunRecord) -> bool:
    """Begin the record of a run that nobody asks to stop, as app/ddp_loop.py does."""
    run = record.run
    wrapped = run.strategy.wrap(run.model)
    bench = Bench(run.settings, run.world, run.data, run.strategy, run.model, wrapped, loader=None)
    state = TrainingState(run.model, bench.optimization(run.plan.total_steps), run.strategy, run.world)
    return record.begin(state, wrapped, SimpleNamespace(requested=lambda: False))


def do_steps(record: RunRecord, n: int = 1, *, loss: float = 0.5, grad_norm: float = 1.25) -> None:
    """Record the next steps, each with two micro-batches of 2 rows, which have 3 tokens each."""
    batch = dict.fromkeys(("input_ids", "attention_mask"), torch.ones(2, 3, dtype=torch.int64))
    losses, first = torch.tensor([loss - 0.25, loss + 0.25]), record.steps.last_step + 1
    for step in range(first, first + n):
        record.after_step(step, losses, torch.tensor(grad_norm), learning_rate=1e-3, batches=[batch, batch])


def finish(record: RunRecord) -> None:
    """Finish a run that predicts every test row correctly."""
    labels = record.run.data.table.labels[record.run.data.split.test]
    logits = torch.nn.functional.one_hot(torch.from_numpy(labels), 2).double().numpy()
    record.finish(logits, score(logits, labels))


def on_disk(record: RunRecord, name: str = "step") -> list[float | None]:
    """Return a value of each line of the log of steps."""
    return [json.loads(line)[name] for line in (record.folder / STEPS).read_text().splitlines()]


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Files may have so many bytes in the block: writing more fails in the middle, as on a full disk."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


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
