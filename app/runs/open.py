"""Open the record of a run, which includes claiming the run folder for this job."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from app.data.csv_table import ReviewTable
from app.data.split import Split
from app.distributed.collectives import all_gather_object, broadcast_object, raise_on_all_ranks
from app.distributed.world import World
from app.errors import UserError
from app.hardware import device_name, peak_flops
from app.model.identity import ModelIdentity
from app.runs.arithmetic import gather_arithmetic
from app.runs.contents import RunInfo
from app.runs.folder import claim_folder, remove_claimed
from app.runs.record import RunRecord
from app.runs.resume import Resume
from app.runs.schema import RUNS
from app.settings import Settings


def open_run(
    path_name: str,
    settings: Settings,
    table: ReviewTable,
    split: Split,
    world: World,
    resume: Resume,
    rows_of_step: Callable[[int], Sequence[int]],
    model: ModelIdentity = ModelIdentity(),  # noqa: B008  # it is immutable
    measured_peak_flops: float | None = None,
    deepspeed_config: dict[str, Any] | None = None,
) -> RunRecord:
    """Claim the run's folder, and return the record that writes to it. Collective.

    Nothing in an existing folder changes before `RunRecord.begin`.

    Args:
        rows_of_step: returns this rank's data rows of an optimizer step, counted from 1.
        model: the content of the model's files.
        measured_peak_flops: the peak of this rank's device in FLOP/s; None: the one in the manufacturer's data sheet.
        deepspeed_config: the configuration of DeepSpeed, which is recorded; None without it.

    Raises:
        AgreedError: the folder can't be created or written, another job uses it, or not all ranks see it.
    """
    name = device_name(world.device)
    peak = measured_peak_flops or peak_flops(name, settings.precision or "fp32")
    devices, peaks = zip(*all_gather_object((name, peak), world), strict=True)  # ranks may differ
    folder, lock = resume.folder, resume.lock
    with raise_on_all_ranks(world):
        if world.is_main_process and folder is None:
            folder, lock = claim_folder(settings.output_dir, RUNS / path_name)
    folder = broadcast_object(folder, world)
    assert folder is not None
    if settings.save_strategy != "no" or settings.load_best_model_at_end or settings.profile:
        _refuse_unshared_folder(folder, is_new=resume.folder is None, world=world)
    info = RunInfo(
        path_name=path_name,
        settings=settings,
        table=table,
        split=split,
        world=world,
        devices=devices,
        launchers=resume.launchers,
        model=model,
        peak_flops=None if None in peaks else sum(peaks),
        deepspeed_config=deepspeed_config,
        arithmetic=gather_arithmetic(world),
    )
    return RunRecord(info, resume, rows_of_step, folder, lock)


def _refuse_unshared_folder(folder: Path, is_new: bool, world: World) -> None:
    """Refuse a folder that only some nodes see: a checkpoint in it could not be resumed. Collective."""
    probe = folder / broadcast_object(f".shared-{uuid.uuid4().hex}.tmp", world)
    with raise_on_all_ranks(world):
        if world.is_main_process:
            try:
                probe.touch()
            except OSError as problem:
                raise UserError(f"--output_dir {folder}: can't be written: {problem.strerror}") from None
    ranks_that_see_it = all_gather_object(probe.exists(), world)
    with raise_on_all_ranks(world):
        if world.is_main_process:
            with suppress(OSError):
                probe.unlink()
        if not all(ranks_that_see_it):
            if world.is_main_process and is_new:
                remove_claimed(folder)
            ranks = ", ".join(str(rank) for rank, sees_it in enumerate(ranks_that_see_it) if not sees_it)
            raise UserError(
                f"--output_dir {folder}: rank(s) {ranks} can't see it: name a folder on a file system that all nodes "
                "share, or turn checkpoints off with --save_strategy no, and do not use --profile"
            )
