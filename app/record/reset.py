"""Reset a run's folder to the state after the checkpoint that the run resumes from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ..checkpoint.manager import latest_first, remove, step_of
from ..checkpoint.resume import Resume
from ..common.errors import UserError
from ..common.files import commit, write_json, write_text
from ..distributed.collectives import raise_on_all_ranks
from ..runs.folder import point_latest
from ..runs.schema import CHECKPOINTS, EVALUATIONS, LOGS, PROFILE_STAGING, RESULTS, SETTINGS, SPLIT
from .json_files import RunInfo, settings_content, split_content


class FolderReset:
    """The reset of a run's folder, once, before the first steps are written to it. Every rank holds one.

    In an existing folder, nothing is removed or overwritten before the first step has succeeded on all ranks. If the
    run is rejected or fails before that, the folder is unchanged, and a restarted job resumes from the same checkpoint.
    A new folder is written at once, because a restarted job recognizes it by its settings.json.

    Attributes:
        is_done: whether the folder has been reset.
    """

    def __init__(self, folder: Path, info: RunInfo, resume: Resume) -> None:
        self.folder, self.info, self.resume = folder, info, resume
        self.is_done = False
        self.deferred: list[Callable[[], None]] = []

    def begin(self, wrapper: str, step_to_evaluate: int | None) -> None:
        """Reset a new folder. Collective. For the arguments and errors, see `reset_folder`."""
        self.write_start = partial(
            reset_folder,
            self.folder,
            self.info,
            resume=self.resume,
            wrapper=wrapper,
            step_to_evaluate=step_to_evaluate,
        )
        if self.resume.folder is None:
            self.run()

    def run(self) -> None:
        """Reset the folder, unless that is done, and do the deferred writes. Collective."""
        if self.is_done:
            return
        with raise_on_all_ranks(self.info.world):
            if self.info.world.is_main_process:
                self.write_start()
        self.is_done = True
        for write in self.deferred:
            write()
        self.deferred.clear()

    def write_after(self, write: Callable[[], None]) -> None:
        """Write something now, or as soon as the folder has been reset. `write` may be collective."""
        if self.is_done:
            write()
        else:
            self.deferred.append(write)


def reset_folder(folder: Path, info: RunInfo, *, resume: Resume, wrapper: str, step_to_evaluate: int | None) -> None:
    """Remove the files that a run wrote after its checkpoint, and write the first ones. Call it on rank 0.

    Args:
        wrapper: the class of the wrapped model.
        step_to_evaluate: the checkpoint's own step, if its evaluation is repeated.

    Raises:
        UserError: the folder cannot be written, or files of the run to resume have been removed meanwhile.
    """
    logs = {name: resume.lines_of(name, step_to_evaluate if name == EVALUATIONS.name else None) for name in LOGS}
    try:
        # First, because it fails if the checkpoints are on a disk that is mounted read-only: then nothing is lost.
        for checkpoint in latest_first(folder / CHECKPOINTS):
            if step_of(checkpoint) > resume.step:  # damaged, or of steps that are repeated
                remove(checkpoint)
        for name in RESULTS:
            (folder / name).unlink(missing_ok=True)
        # A restarted job recognizes its folder by settings.json and resumes from the latest checkpoint in it. So write
        # settings.json after later checkpoints are removed, and before anything else in a new folder.
        write_json(folder / SETTINGS.name, settings_content(info) | {"wrapper": wrapper})
        write_json(folder / SPLIT.name, split_content(info))
        if info.settings.output_dir is None and resume.folder is None:
            point_latest(folder)  # only now: `auto` looks there for settings.json
        shutil.rmtree(folder / PROFILE_STAGING, ignore_errors=True)  # of a process that was killed
        copy_best(resume.best, folder, folder / CHECKPOINTS)
        for name, lines in logs.items():
            if lines:
                write_text(folder / name, "".join(lines))
            else:
                (folder / name).unlink(missing_ok=True)
    except OSError as problem:
        raise UserError(f"{problem.filename or folder}: cannot be written: {problem.strerror or problem}") from None


def copy_best(source: Path | None, run: Path, checkpoints: Path) -> None:
    """Copy the best weights next to the checkpoint from which a new run resumes. Call it on rank 0.

    Args:
        source: their folder, which may be this run's own; None without one.
        run: the folder of the new run.
        checkpoints: the folder of its checkpoints.

    Raises:
        UserError: another job has removed the folder.
    """
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
