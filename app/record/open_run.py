"""Open the record of a run, which includes claiming the run folder for this job."""

from __future__ import annotations

import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..checkpoint.resume import Resume
from ..common.errors import UserError
from ..common.machine import device_name, peak_flops
from ..distributed.arithmetic import gather_arithmetic
from ..distributed.collectives import all_gather_object, broadcast_object, raise_on_all_ranks
from ..distributed.world import World
from ..runs.folder import claim_folder, remove_claimed
from ..runs.schema import RUNS
from .json_files import RunInfo
from .run_record import RunRecord
from .steps import RowsOfStep


def open_run(
    info: RunInfo,
    resume: Resume,
    rows_of_step: RowsOfStep,
    *,
    measured_peak_flops: float | None = None,
) -> RunRecord:
    """Claim the run's folder, and return the record that writes to it. Collective.

    Nothing in an existing folder changes before `RunRecord.begin`.

    Args:
        measured_peak_flops: the peak of this rank's device in FLOP/s; None: the one in the manufacturer's data sheet.

    Raises:
        AgreedError: the folder cannot be created or written, another job uses it, or not all ranks see it.
    """
    settings, world = info.settings, info.world
    name = device_name(world.device)
    peak = measured_peak_flops or peak_flops(name, settings.precision)
    devices, peaks = zip(*all_gather_object((name, peak), world), strict=True)  # ranks may differ
    folder, lock = resume.folder, resume.lock
    with raise_on_all_ranks(world):
        if world.is_main_process and folder is None:
            folder, lock = claim_folder(settings.output_dir, RUNS / info.path_name)
    folder = broadcast_object(folder, world)
    assert folder is not None
    if settings.save_strategy != "no" or settings.load_best_model_at_end or settings.profile:
        _reject_unshared_folder(folder, is_new=resume.folder is None, world=world)
    info = replace(
        info,
        devices=devices,
        launchers=resume.launchers,
        peak_flops=None if None in peaks else sum(peaks),
        arithmetic=gather_arithmetic(world),
    )
    return RunRecord(info, resume, rows_of_step, folder=folder, lock=lock)


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
    with raise_on_all_ranks(world):
        if world.is_main_process:
            with suppress(OSError):
                probe.unlink()
        if not all(ranks_that_see_it):
            if world.is_main_process and is_new:
                remove_claimed(folder)
            ranks = ", ".join(str(rank) for rank, sees_it in enumerate(ranks_that_see_it) if not sees_it)
            raise UserError(
                f"--output_dir {folder}: rank(s) {ranks} cannot see it: name a folder on a file system that all nodes "
                "share, or turn checkpoints off with --save_strategy no, and do not use --profile"
            )
