"""A run's folder: claim it for this job, and reset it to the state after the checkpoint that the run resumes from."""

from __future__ import annotations

import os
import platform
import shutil
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.manager import latest_first, remove, step_of
from ..checkpoint.resume import Resume
from ..common.errors import AgreedError, UserError
from ..common.files import commit, write_json, write_text
from ..common.machine import Arithmetic, device_name, git_commit, kernels
from ..data.reviews import ReviewTable
from ..data.split import Split
from ..distributed.collectives import all_gather_object, broadcast_object, gather_arithmetic, raise_on_all_ranks
from ..distributed.world import World
from ..model.identity import ModelIdentity
from ..runs.folder import claim_folder, point_latest, remove_claimed
from ..runs.schema import (
    CHECKPOINTS,
    EVALUATIONS,
    LOGS,
    PROFILE_STAGING,
    RESULTS,
    RUN_STATE_VERSION,
    RUNS,
    SETTINGS,
    SPLIT,
)
from ..settings import Settings

PACKAGES = (
    *("torch", "transformers", "datasets", "evaluate", "accelerate", "tokenizers"),
    *("pandas", "scikit-learn", "scipy", "numpy"),
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
    devices: Sequence[str] = ()  # the name of each rank's device
    arithmetic: Arithmetic = field(default_factory=dict)  # as returned by `gather_arithmetic`


def open_run(info: RunInfo, resume: Resume) -> RunFolder:
    """Claim the run's folder for this job. Collective. Nothing in an existing folder changes before it is reset.

    Raises:
        AgreedError: the folder cannot be created or written, another job uses it, or not all ranks see it.
    """
    settings, world = info.settings, info.world
    devices = all_gather_object(device_name(world.device), world)  # ranks may differ
    path, lock = resume.folder, resume.lock
    with raise_on_all_ranks(world):
        if world.is_main_process and path is None:
            path, lock = claim_folder(settings.output_dir, RUNS / info.path_name)
    path = broadcast_object(path, world)
    assert path is not None
    if settings.save_strategy != "no" or settings.load_best_model_at_end or settings.profile:
        _reject_unshared_folder(path, is_new=resume.folder is None, world=world)
    info = replace(
        info,
        devices=devices,
        arithmetic=gather_arithmetic(world),
    )
    return RunFolder(path, info, resume, lock=lock)


def _reject_unshared_folder(folder: Path, is_new: bool, world: World) -> None:
    """Reject a folder that only some nodes see: a checkpoint in it could not be resumed. Collective."""
    probe = folder / broadcast_object(f".shared-{uuid.uuid4().hex}.tmp", world)
    with raise_on_all_ranks(world):
        if world.is_main_process:
            try:
                probe.touch()
            except OSError as problem:
                raise UserError(f"--output_dir {folder}: cannot be written: {problem.strerror}") from None
    ranks_that_see_it = all_gather_object(probe.exists(), world)
    if world.is_main_process:
        with suppress(OSError):
            probe.unlink()
    if not all(ranks_that_see_it):
        if world.is_main_process and is_new:
            remove_claimed(folder)
        ranks = ", ".join(str(rank) for rank, sees_it in enumerate(ranks_that_see_it) if not sees_it)
        raise AgreedError(
            f"--output_dir {folder}: rank(s) {ranks} cannot see it: name a folder on a file system that all nodes "
            "share, or turn checkpoints off with --save_strategy no, and do not use --profile"
        )


class RunFolder:
    """A run's folder, which is reset once, before the first steps are written to it. Every rank holds one.

    In an existing folder, nothing is removed or overwritten before the first step has succeeded on all ranks. If the
    run is rejected or fails before that, the folder is unchanged, and a restarted job resumes from the same checkpoint.
    A new folder is written at once, because a restarted job recognizes it by its settings.json.
    """

    def __init__(self, path: Path, info: RunInfo, resume: Resume, *, lock: int | None) -> None:
        """`lock`: on rank 0, the descriptor that keeps other jobs out of the folder."""
        self.path, self.info, self.resume, self.lock = path, info, resume, lock
        self.is_reset = False
        self.deferred: list[Callable[[], None]] = []

    def begin(self, wrapper: str, step_to_evaluate: int | None) -> None:
        """Reset a new folder now, and an existing one when `reset` is called. Collective.

        Args:
            wrapper: the class of the wrapped model.
            step_to_evaluate: the checkpoint's own step, if its evaluation is repeated.
        """
        self.wrapper, self.step_to_evaluate = wrapper, step_to_evaluate
        if self.resume.folder is None:
            self.reset()

    def reset(self) -> None:
        """Reset the folder, unless that is done, and do the deferred writes. Collective.

        Raises:
            AgreedError: the folder cannot be written, or files of the run to resume have been removed meanwhile.
        """
        if self.is_reset:
            return
        with raise_on_all_ranks(self.info.world):
            if self.info.world.is_main_process:
                self._reset()
        self.is_reset = True
        for write in self.deferred:
            write()
        self.deferred.clear()

    def write_after_reset(self, write: Callable[[], None]) -> None:
        """Write something now, or as soon as the folder has been reset. `write` may be collective."""
        if self.is_reset:
            write()
        else:
            self.deferred.append(write)

    def unlock(self) -> None:
        """Let other jobs use the folder."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def _reset(self) -> None:
        """Remove the files that a run wrote after its checkpoint, and write the first ones."""
        path, resume = self.path, self.resume
        before = {EVALUATIONS.name: self.step_to_evaluate}
        logs = {name: resume.lines_of(name, before.get(name)) for name in LOGS}
        try:
            # First, because it fails if the checkpoints are on a disk that is mounted read-only: then nothing is lost.
            for checkpoint in latest_first(path / CHECKPOINTS):
                if step_of(checkpoint) > resume.step:  # damaged, or of steps that are repeated
                    remove(checkpoint)
            for name in RESULTS:
                (path / name).unlink(missing_ok=True)
            # A restarted job recognizes its folder by settings.json and resumes from the latest checkpoint in it. So
            # write settings.json after later checkpoints are removed, and before anything else in a new folder.
            write_json(path / SETTINGS.name, settings_content(self.info, resume.launchers) | {"wrapper": self.wrapper})
            write_json(path / SPLIT.name, split_content(self.info))
            if self.info.settings.output_dir is None and resume.folder is None:
                point_latest(path)  # only now: `auto` looks there for settings.json
            shutil.rmtree(path / PROFILE_STAGING, ignore_errors=True)  # of a process that was killed
            copy_best(resume.best, path)
            for name, lines in logs.items():
                if lines:
                    write_text(path / name, "".join(lines))
                else:
                    (path / name).unlink(missing_ok=True)
        except OSError as problem:
            raise UserError(f"{problem.filename or path}: cannot be written: {problem.strerror or problem}") from None


def copy_best(source: Path | None, run: Path) -> None:
    """Copy the best weights of another run, if there are any, to the new run that resumes from it. Call it on rank 0.

    Args:
        source: their folder, which may be in this run already.

    Raises:
        UserError: another job has removed the folder.
    """
    checkpoints = run / CHECKPOINTS
    if source is None or source.resolve() == (checkpoints / source.name).resolve():
        return
    staging = run / ".best.tmp"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        shutil.copytree(source, staging)
    except OSError:
        if not source.is_dir():
            raise UserError(f"{source}: has been removed since this run was started") from None
        raise
    checkpoints.mkdir(exist_ok=True)
    commit(staging, checkpoints / source.name)


def settings_content(info: RunInfo, launchers: Collection[str]) -> dict[str, Any]:
    """Return the content of settings.json: the settings, and what else is needed to reproduce the run."""
    return info.settings.as_dict() | {
        "path": info.path_name,
        **info.model.as_dict(),
        "csv": str(info.table.path),
        "world_size": info.world.size,
        "devices": list(info.devices),
        "launchers": list(launchers),
        "threads": torch.get_num_threads(),
        "kernels": kernels(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        "git_commit": git_commit(),
        "deepspeed_config": None,  # only runs that were trained with DeepSpeed have one
    }


def run_state_content(info: RunInfo, progress: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a checkpoint's run_state.json, which resuming needs besides the training state."""
    return {
        "format_version": RUN_STATE_VERSION,
        "path": info.path_name,
        "world_size": info.world.size,
        "device": device_name(info.world.device),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "arithmetic": info.arithmetic,
        "threads": torch.get_num_threads(),
        "fingerprint": info.split.fingerprint,
        "settings": info.settings.as_dict(),
        **info.model.as_dict(),
        **progress,
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
