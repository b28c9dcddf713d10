"""The files that describe a run: settings.json, split.json and a checkpoint's run_state.json."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch

from ..cli import command_line
from ..common.files import write_json, write_text
from ..common.machine import git_commit, kernels
from ..runs.folder import point_latest
from ..runs.reader import read_object
from ..runs.schema import LOGS, SETTINGS, SPLIT
from ..training.prepare import Preparation

PACKAGES = (
    *("torch", "transformers", "datasets", "evaluate", "accelerate", "tokenizers"),
    *("pandas", "scikit-learn", "scipy", "numpy"),
)


def write_description(run: Preparation, wrapper: str) -> None:
    """Write settings.json, split.json and, from another run's folder, the lines of the logs up to the checkpoint.

    Call it on rank 0 when nothing can be rejected any more. A restarted job recognizes its folder by settings.json, so
    `latest` points to it only now.

    Raises:
        OSError: the folder cannot be written.
    """
    start = {"command": command_line(), "date": datetime.now(UTC).isoformat(" ", "seconds")}
    if run.resume.folder is not None:  # a run that continues in its folder keeps the command that started it
        recorded = read_object(run.folder, SETTINGS)
        start = {key: recorded.get(key, value) for key, value in start.items()}
    write_json(run.folder / SETTINGS.name, settings_content(run) | start | {"wrapper": wrapper})
    write_json(run.folder / SPLIT.name, split_content(run))
    for log in (run.folder / log for log in LOGS):
        if (lines := run.resume.lines_of(log.name)) and not log.exists():
            write_text(log, lines)
    if run.settings.output_dir is None and run.resume.folder is None:
        point_latest(run.folder)


def settings_content(run: Preparation) -> dict[str, Any]:
    """Return the content of settings.json: the settings, and what else is needed to reproduce the run."""
    return run.settings.as_dict() | {
        "path": run.path_name,
        **run.identity,
        "csv": str(run.data.table.path),
        "world_size": run.world.size,
        "devices": list(run.devices),
        "launchers": list(run.resume.launchers),
        "threads": torch.get_num_threads(),
        "kernels": kernels(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        "git_commit": git_commit(),
        "deepspeed_config": None,  # only runs that were trained with DeepSpeed have one
    }


def run_state_content(run: Preparation, step: int) -> dict[str, Any]:
    """Return the content of a checkpoint's run_state.json, which resuming needs besides the training state."""
    return {
        "path": run.path_name,
        "step": step,
        "total_steps": run.plan.total_steps,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "arithmetic": run.arithmetic,
        "threads": torch.get_num_threads(),
        "fingerprint": run.data.split.fingerprint,
        "settings": run.settings.as_dict(),
        **run.identity,
    }


def split_content(run: Preparation) -> dict[str, Any]:
    settings, table, split = run.settings, run.data.table, run.data.split
    return {
        "csv": table.path.name,
        "csv_sha256": table.sha256,
        "rows_read": table.rows_read,
        "rows_dropped": {reason: len(rows) for reason, rows in table.dropped.items()},
        "classes": list(table.class_names),
        "seed": settings.seed,
        "test_size": settings.test_size,
        "validation_size": settings.validation_size,
        "n_train": len(split.train),
        "n_validation": len(split.validation),
        "n_test": len(split.test),
        "duplicates": run.data.duplicates,
        "fingerprint": split.fingerprint,
        "csv_escape": "'",  # predictions.csv is written by app.runs.csv_escape.escape
    }
