"""Helpers for tests of `RunRecord`: steps without training, and a strategy that records how it is called."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from app.data.sampler import BatchPlan
from app.distributed.preemption import StopRequest
from app.metrics.score import score
from app.record.run_record import RunRecord
from app.record.steps import Step, count_tokens
from app.runs.schema import EVALUATIONS, SCHEDULE, STEPS


class NeverStop(StopRequest):
    """A stop request that never comes."""

    def __init__(self) -> None:
        pass

    def requested(self) -> bool:
        return False


class SavedState:
    """A training state without tensors, which counts how often it is saved and loaded."""

    def __init__(self) -> None:
        self.saved: list[bool] = []
        self.loaded: list[Path] = []

    def save(self, folder: Path, weights_only: bool = False) -> list[str]:
        self.saved.append(weights_only)
        (folder / SCHEDULE).write_text("{}")
        return [SCHEDULE]

    def load(self, folder: Path, weights_only: bool = False) -> None:
        assert weights_only
        self.loaded.append(folder)


def begin(record: RunRecord, plan: BatchPlan) -> bool:
    """Begin the run of a model whose wrapper is a `Linear`."""
    return record.begin(SavedState(), torch.nn.Linear(2, 2), NeverStop())  # type: ignore[arg-type]


def add_steps(record: RunRecord, *steps: int, grad_norm: float = 1.25) -> None:
    """Add steps with two micro-batches of 2 rows, each of 3 tokens, and write them."""
    for step in steps:
        batch = dict.fromkeys(("input_ids", "attention_mask"), torch.ones(2, 3, dtype=torch.int64))
        line = {"step": step, "epoch": step / record.plan.steps_per_epoch, "loss": None, "grad_norm": None}
        line |= {"learning_rate": 1e-3, **count_tokens([batch, batch])}
        record.steps.add(Step(line, torch.tensor([0.25, 0.75]), torch.tensor(grad_norm)))
    record.write_steps()


def steps_on_disk(record: RunRecord) -> list[int]:
    """Return the steps in steps.jsonl."""
    return [json.loads(line)["step"] for line in (record.folder / STEPS.name).read_text().splitlines()]


def evaluations_on_disk(record: RunRecord) -> list[int]:
    """Return the steps in evaluations.jsonl."""
    return [json.loads(line)["step"] for line in (record.folder / EVALUATIONS.name).read_text().splitlines()]


def finish(record: RunRecord, **parts: Any) -> None:
    """Finish the run with other parts of its preparation, such as its `model`."""
    record.run = replace(record.run, **parts)
    record.finish(**correct_predictions(record))


def correct_predictions(record: RunRecord) -> dict[str, Any]:
    """Return logits that predict every test row correctly, and their scores, as `RunRecord.finish` takes them."""
    labels = record.run.data.table.labels[record.run.data.split.test]
    logits = torch.nn.functional.one_hot(torch.from_numpy(labels), 2).double().numpy()
    return {"logits": logits, "scores": score(logits, labels)}
