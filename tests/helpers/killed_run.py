"""The folder of a run that was killed, written without training, for tests of the code that resumes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from app.checkpoint.manager import commit_checkpoint
from app.common.machine import device_name
from app.runs.schema import CHECKPOINTS, EVALUATIONS, RUN_STATE, RUN_STATE_VERSION, SETTINGS, STEPS
from app.settings import Settings

CPU = device_name(torch.device("cpu"))
STEP, TOTAL, FINGERPRINT = 4, 9, "f" * 64
RECORDED = {"path": "ddp_loop", "world_size": 1, "csv": "reviews.csv", "train_batch_size": 8}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A run that was killed after its checkpoint-4, in the middle of writing step 6."""
    return make_run(tmp_path / "run")


def make_run(folder: Path, **settings) -> Path:
    mine = Settings(learning_rate=1e-3, **settings).as_dict()
    state = {"path": "ddp_loop", "step": STEP, "total_steps": TOTAL, "fingerprint": FINGERPRINT, "world_size": 1}
    state |= {"format_version": RUN_STATE_VERSION, "device": CPU, "threads": 3}
    for name, files in (("checkpoint-4", {RUN_STATE: state | {"settings": mine, "best": {"step": 2}}}), ("best-2", {})):
        staging = folder / CHECKPOINTS / ".writing" / name
        staging.mkdir(parents=True)
        for file, content in (files | {"weights": 1}).items():
            (staging / file).write_text(json.dumps(content))
        commit_checkpoint(staging, folder / CHECKPOINTS / name)
    (folder / SETTINGS.name).write_text(json.dumps(RECORDED))
    (folder / STEPS.name).write_text("".join(map(step_line, range(1, 6))) + '{"step": 6, "lo')
    (folder / EVALUATIONS.name).write_text(evaluation_line(2) + evaluation_line(5))
    return folder


def step_line(step: int) -> str:
    numbers = dict.fromkeys(["epoch", "loss", "learning_rate", "examples", "tokens", "padded_tokens", "seconds"], 1.5)
    return json.dumps({"step": step} | numbers) + "\n"


def evaluation_line(step: int) -> str:
    return json.dumps({"step": step, "epoch": 1.0, "rows": "test", "accuracy": 0.5, "loss": 0.7}) + "\n"
