"""The facts about a run, its folder, and the files that describe it."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.resume import Resume
from ..common.errors import AgreedError, UserError
from ..common.files import write_json
from ..common.machine import Arithmetic, device_name, git_commit, kernels
from ..data.reviews import ReviewTable
from ..data.sampler import BatchPlan
from ..data.split import Split
from ..distributed.collectives import all_gather_object, broadcast_object, gather_arithmetic, raise_on_all_ranks
from ..distributed.world import World
from ..model.identity import ModelIdentity
from ..model.vocabulary import TrimmedVocabulary
from ..runs.folder import claim_folder, point_latest, remove_claimed
from ..runs.schema import LOCK, RUNS, SETTINGS, SPLIT
from ..settings import Settings
from .steps import RowsOfStep

PACKAGES = (
    *("torch", "transformers", "datasets", "evaluate", "accelerate", "tokenizers"),
    *("pandas", "scikit-learn", "scipy", "numpy"),
)


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """All that describes a run, before it starts. `open_run` fills in its folder and what all ranks have together."""

    path_name: str  # the training path, `ddp_loop` or `trainer_run`
    settings: Settings
    table: ReviewTable
    split: Split
    duplicates: Mapping[str, int]  # as returned by `count_duplicates`
    world: World
    model: ModelIdentity
    plan: BatchPlan
    rows_of_step: RowsOfStep
    resume: Resume
    vocabulary: TrimmedVocabulary | None = None  # the embeddings that are not trained, if there are any
    folder: Path = Path()
    lock: int | None = None  # on rank 0, the descriptor that keeps other jobs out of `folder`
    devices: Sequence[str] = ()  # the name of each rank's device
    arithmetic: Arithmetic = field(default_factory=dict)  # as returned by `gather_arithmetic`


def open_run(info: RunInfo) -> RunInfo:
    """Claim the run's folder for this job, and complete the facts. Collective.

    Raises:
        AgreedError: the folder cannot be written, another job uses it, or not all ranks see it.
    """
    settings, world, resume = info.settings, info.world, info.resume
    devices = all_gather_object(device_name(world.device), world)  # ranks may differ
    path, lock_fd = resume.folder, resume.lock
    with raise_on_all_ranks(world):
        if world.is_main_process and path is None:
            path, lock_fd = claim_folder(settings.output_dir, RUNS / info.path_name)
    path = broadcast_object(path, world)
    assert path is not None
    needs_all = settings.save_strategy != "no" or settings.load_best_model_at_end or settings.profile
    visible = all_gather_object((path / LOCK).exists(), world)
    if needs_all and not all(visible):
        if world.is_main_process and resume.folder is None:
            remove_claimed(path)
        ranks = ", ".join(str(rank) for rank, sees_it in enumerate(visible) if not sees_it)
        raise AgreedError(
            f"--output_dir {path}: rank(s) {ranks} cannot see it: name a folder on a file system that all nodes share, "
            "or turn checkpoints off with --save_strategy no, and do not use --profile"
        )
    return replace(
        info,
        folder=path,
        lock=lock_fd,
        devices=devices,
        arithmetic=gather_arithmetic(world),
    )


def describe_run(info: RunInfo, wrapper: str) -> None:
    """Write settings.json and split.json. Call it on rank 0 when nothing can be rejected any more.

    A restarted job recognizes its folder by settings.json, so `latest` points to it only now.
    """
    path = info.folder
    try:
        write_json(path / SETTINGS.name, settings_content(info) | {"wrapper": wrapper})
        write_json(path / SPLIT.name, split_content(info))
        if info.settings.output_dir is None and info.resume.folder is None:
            point_latest(path)
    except OSError as problem:
        raise UserError(f"{path}: cannot be written: {problem.strerror or problem}") from None


def settings_content(info: RunInfo) -> dict[str, Any]:
    """Return the content of settings.json: the settings, and what else is needed to reproduce the run."""
    return info.settings.as_dict() | {
        "path": info.path_name,
        **info.model.as_dict(),
        "csv": str(info.table.path),
        "world_size": info.world.size,
        "devices": list(info.devices),
        "launchers": list(info.resume.launchers),
        "threads": torch.get_num_threads(),
        "kernels": kernels(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        "git_commit": git_commit(),
        "deepspeed_config": None,  # only runs that were trained with DeepSpeed have one
    }


def run_state_content(info: RunInfo, step: int) -> dict[str, Any]:
    """Return the content of a checkpoint's run_state.json, which resuming needs besides the training state."""
    return {
        "path": info.path_name,
        "step": step,
        "total_steps": info.plan.total_steps,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "arithmetic": info.arithmetic,
        "threads": torch.get_num_threads(),
        "fingerprint": info.split.fingerprint,
        "settings": info.settings.as_dict(),
        **info.model.as_dict(),
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
