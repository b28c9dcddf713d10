"""The contents of settings.json, split.json, run_state.json and metrics.json."""

from __future__ import annotations

import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

import torch

from ..common.machine import device_name, git_commit, kernels
from ..data.csv_table import ReviewTable
from ..data.split import Split
from ..distributed.arithmetic import Arithmetic
from ..distributed.world import World
from ..metrics.score import Scores
from ..model.identity import ModelIdentity
from ..runs.schema import RUN_STATE_VERSION
from ..settings import Settings
from .steps import Totals

PACKAGES = (
    *("torch", "transformers", "datasets", "evaluate", "accelerate", "tokenizers"),
    *("pandas", "scikit-learn", "numpy"),
)


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The facts about a run before it starts. `open_run` fills in those that all ranks together determine."""

    path_name: str  # the training path, `ddp_loop` or `trainer_run`
    settings: Settings
    table: ReviewTable
    split: Split
    duplicates: Mapping[str, int]  # as returned by `count_duplicates`
    world: World
    model: ModelIdentity
    deepspeed_config: dict[str, Any] | None = None  # completed from the settings; None without DeepSpeed
    devices: Sequence[str] = ()  # the name of each rank's device
    launchers: Collection[str] = ()  # the torchrun processes of this job
    peak_flops: float | None = None  # of all ranks' devices together, in FLOP/s; None if it is unknown
    arithmetic: Arithmetic = field(default_factory=dict)  # as returned by `gather_arithmetic`


def settings_content(info: RunInfo) -> dict[str, Any]:
    """Return the content of settings.json: the settings, and what else is needed to reproduce the run."""
    packages = PACKAGES if info.deepspeed_config is None else (*PACKAGES, "deepspeed")
    return info.settings.as_dict() | {
        "path": info.path_name,
        **info.model.as_dict(),
        "csv": str(info.table.path),
        "world_size": info.world.size,
        "devices": list(info.devices),
        "launchers": list(info.launchers),
        "threads": torch.get_num_threads(),
        "kernels": kernels(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
        "git_commit": git_commit(),
        "deepspeed_config": info.deepspeed_config,
    }


def split_content(info: RunInfo) -> dict[str, Any]:
    settings, table, split = info.settings, info.table, info.split
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
        "duplicates": dict(info.duplicates),
        "fingerprint": split.fingerprint,
        "csv_escape": "'",  # predictions.csv is written by app.runs.csv_escape.escape
    }


def run_state_content(
    info: RunInfo, step: int, *, total_steps: int, totals: Totals, best: Mapping[str, Any], evaluations: int
) -> dict[str, Any]:
    """Return the content of a checkpoint's run_state.json, which resuming needs besides the training state.

    Args:
        best: the fields of `Best`.
        evaluations: the number of evaluations so far.
    """
    return {
        "format_version": RUN_STATE_VERSION,
        "path": info.path_name,
        "step": step,
        "total_steps": total_steps,
        "world_size": info.world.size,
        "device": device_name(info.world.device),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "arithmetic": info.arithmetic,
        "threads": torch.get_num_threads(),
        "fingerprint": info.split.fingerprint,
        "settings": info.settings.as_dict(),
        "deepspeed_config": info.deepspeed_config,
        **info.model.as_dict(),
        "totals": asdict(totals),
        "best": best,
        "evaluations": evaluations,
    }


def metrics_content(scores: Scores, totals: Totals, peak_memory: Sequence[int], *, mfu: float | None) -> dict[str, Any]:
    """Return the content of metrics.json, except for the hash.

    Args:
        scores: the scores of the test rows.
        peak_memory: of each rank, in bytes.
        mfu: model FLOPs utilization; None if it is unknown.
    """
    metrics = asdict(scores)
    metrics["n_test"] = metrics.pop("n")
    return metrics | {
        "train_seconds": totals.train_seconds,
        "train_examples_per_second": totals.examples_per_second,
        "train_tokens_per_second": totals.tokens / totals.train_seconds,
        "padding_fraction": 1 - totals.tokens / totals.padded_tokens,
        "mfu": mfu,
        "skipped_steps": totals.skipped,
        "peak_memory_bytes": list(peak_memory),
    }
