"""The folder of a run that was killed, written without training, for tests of the code that resumes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from app.checkpoint.manager import RUN_STATE_VERSION
from app.common.machine import device_name
from app.runs.hashes import hash_files
from app.runs.schema import CHECKPOINTS, EVALUATIONS, RUN_STATE, SCHEDULE, SETTINGS, STEPS
from app.settings import Settings

CPU = device_name(torch.device("cpu"))
STEP, TOTAL, FINGERPRINT = 4, 9, "f" * 64
IDENTITY = dict.fromkeys(("model_commit", "model_config", "model_code_sha256", "tokens_sha256"))
RECORDED = {"path": "ddp_loop", "world_size": 1, "csv": "reviews.csv", "train_batch_size": 8}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A run that was killed after its checkpoint-4, in the middle of writing step 6."""
    return make_run(tmp_path / "run")


def make_run(folder: Path, **settings: Any) -> Path:
    mine = Settings(learning_rate=1e-3, **settings).as_dict()
    state = {"path": "ddp_loop", "step": STEP, "total_steps": TOTAL, "fingerprint": FINGERPRINT, "settings": mine}
    state |= {"threads": 3, "arithmetic": {}, "torch": torch.__version__, "transformers": transformers.__version__}
    write_checkpoint(folder / CHECKPOINTS / f"checkpoint-{STEP}", state | IDENTITY)
    write_checkpoint(folder / CHECKPOINTS / "best-2", {})
    (folder / SETTINGS.name).write_text(json.dumps(RECORDED))
    (folder / STEPS.name).write_text("".join(map(step_line, range(1, 6))) + '{"step": 6, "lo')
    (folder / EVALUATIONS.name).write_text(evaluation_line(2) + evaluation_line(5))
    return folder


def write_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint whose schedule.json is its only other file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SCHEDULE).write_text("{}")
    state = {"format_version": RUN_STATE_VERSION, "files": {SCHEDULE: hash_files(folder / SCHEDULE)}} | state
    (folder / RUN_STATE).write_text(json.dumps(state))


def step_line(step: int) -> str:
    numbers = dict.fromkeys(["epoch", "loss", "learning_rate", "examples", "tokens", "padded_tokens", "seconds"], 1.5)
    return json.dumps({"step": step, "grad_norm": 1.5} | numbers) + "\n"


def evaluation_line(step: int, accuracy: float = 0.5) -> str:
    return json.dumps({"step": step, "epoch": 1.0, "rows": "test", "accuracy": accuracy, "loss": 0.7}) + "\n"
