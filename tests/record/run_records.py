"""Helpers for tests of `RunRecord`: steps without training, and a training state without tensors."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from app.checkpoint.resume import Resume
from app.metrics.score import score
from app.record.run_record import RunRecord
from app.record.steps import Step, count_tokens
from app.runs.schema import RUN_STATE, SCHEDULE, STEPS

SCORES = {"n": 12, "accuracy": 0.5, "f1": 0.5, "loss": 0.7}
BATCH = dict.fromkeys(("input_ids", "attention_mask"), torch.ones(2, 3, dtype=torch.int64))


class SavedState:
    """A training state without tensors, which remembers what has been loaded."""

    def __init__(self) -> None:
        self.loaded: list[Path] = []

    def save(self, folder: Path, weights_only: bool = False) -> list[str]:
        (folder / SCHEDULE).write_text("{}")
        return [SCHEDULE]

    def load(self, folder: Path, weights_only: bool = False) -> None:
        assert weights_only
        self.loaded.append(folder)


def begin(record: RunRecord) -> bool:
    """Begin the run of a model whose wrapper is a `Linear`, and which nobody asks to stop."""
    return record.begin(SavedState(), torch.nn.Linear(2, 2), SimpleNamespace(requested=lambda: False))


def add_steps(record: RunRecord, *steps: int, grad_norm: float = 1.25) -> None:
    """Add steps with two micro-batches of 2 rows, each of 3 tokens, and write them."""
    for step in steps:
        line = {"step": step, "epoch": step / record.plan.steps_per_epoch, "loss": None, "grad_norm": None}
        line |= {"learning_rate": 1e-3, **count_tokens([BATCH, BATCH])}
        record.steps.add(Step(line, torch.tensor([0.25, 0.75]), torch.tensor(grad_norm)))
    record.write_steps()


def steps_on_disk(record: RunRecord, log: Path = STEPS) -> list[int]:
    """Return the steps in a log."""
    return [json.loads(line)["step"] for line in (record.folder / log).read_text().splitlines()]


def resume_at(record: RunRecord, step: int) -> Resume:
    checkpoint = record.checkpoints.folder / f"checkpoint-{step}"
    return Resume(record.folder, checkpoint, json.loads((checkpoint / RUN_STATE).read_text()))


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Files may have so many bytes in the block: writing more fails in the middle, as on a full disk."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


def finish(record: RunRecord, **parts: Any) -> None:
    """Finish a run that predicts every test row correctly, with other parts of its preparation, such as its `model`."""
    record.run = replace(record.run, **parts)
    labels = record.run.data.table.labels[record.run.data.split.test]
    logits = torch.nn.functional.one_hot(torch.from_numpy(labels), 2).double().numpy()
    record.finish(logits, score(logits, labels))
