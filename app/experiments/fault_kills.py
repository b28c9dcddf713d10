"""How fault injection kills a rank: at a random moment, recognized by the files that the run writes."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from ..distributed.launcher import TorchrunJob
from ..runs import schema

# Steps 6 to 24 have an evaluation and no checkpoint, 5 to 25 a checkpoint and no evaluation, 30 and 36 have both.
STEPS, SAVE_STEPS, EVAL_STEPS = 36, 5, 6
MOMENTS = (
    *("at start up", "in a step", "in a save", "in the save of an evaluation"),
    *("in an evaluation", "before the exit", "at any time"),
)


class RunFiles:
    """Observe a run's progress from outside, by its folder alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.versions_at_start: set[tuple[int, int]] = set()

    def ranks_restarted(self) -> None:
        """Ignore what earlier processes wrote: from now on, only new writes count as progress."""
        self.versions_at_start = self._versions()

    def is_training(self) -> bool:
        """Return whether the current processes have opened the run, that is, written one of its files."""
        return self._versions() != self.versions_at_start

    def last_step(self, log: str) -> int:
        """Return the step in the last line of a log, or 0 if there is none since the restart."""
        with suppress(OSError, IndexError, ValueError, KeyError, TypeError):
            if self.is_training():
                return int(json.loads((self.folder / log).read_text().splitlines()[-1])["step"])
        return 0

    def checkpoint_in_staging(self) -> int:
        """Return the step of the checkpoint that is being written, or 0 if there is none since the restart."""
        with suppress(OSError, StopIteration):  # the staging directory may disappear while it is listed
            if self.is_training():
                name = next(self.folder.glob("checkpoints/.checkpoint-*.tmp")).name
                return int(name.removeprefix(".checkpoint-").removesuffix(".tmp"))
        return 0

    def _versions(self) -> set[tuple[int, int]]:
        """Return inode and modification time of each file that a run writes when it begins to train."""
        versions = set()
        for name in (schema.SETTINGS.name, schema.STEPS.name):
            with suppress(OSError):
                status = (self.folder / name).stat()
                versions.add((status.st_ino, status.st_mtime_ns))
        return versions


class Moment(NamedTuple):
    """Kill `delay` seconds after `condition` becomes true, if it is still true then."""

    condition: Callable[[RunFiles], bool]
    delay: float


def draw_moment(kind: str, rng: random.Random, seconds: float) -> Moment:
    """Draw a moment of a kind in `MOMENTS`; `seconds` is the duration of an uninterrupted job."""
    match kind:
        case "at start up":
            return Moment(lambda files: True, rng.uniform(0, 0.6 * seconds))
        case "in a step":
            step = rng.randrange(1, STEPS)
            return Moment(lambda files: files.last_step(schema.STEPS.name) >= step, rng.uniform(0, 0.2))
        case "in a save":
            step = rng.randrange(1, STEPS)
            return Moment(lambda files: files.checkpoint_in_staging() >= step, rng.uniform(0, 0.03))
        case "in the save of an evaluation":
            return Moment(lambda files: is_due(files.checkpoint_in_staging(), EVAL_STEPS), rng.uniform(0, 0.03))
        case "in an evaluation":
            first = rng.randrange(1, STEPS - SAVE_STEPS)
            return Moment(lambda files: first <= step_in_evaluation(files), rng.uniform(0, 0.05))
        case "before the exit":
            file = rng.choice([schema.METRICS.name, schema.PREDICTIONS, f".{schema.MODEL_FOLDER}.tmp"])
            return Moment(lambda files: files.is_training() and (files.folder / file).exists(), rng.uniform(0, 0.03))
        case _:
            return Moment(lambda files: True, rng.uniform(0, seconds))


def is_due(step: int, every: int) -> bool:
    """Return whether an event that is due every `every` steps, and after the last step, is due after this step."""
    return step > 0 and (step % every == 0 or step == STEPS)


def step_in_evaluation(files: RunFiles) -> int:
    """Return the step after which the run is being evaluated, or 0.

    The step's line is written before the evaluation and the evaluation's line after it. Steps that also save a
    checkpoint are left out: between their two lines, the checkpoint may be written instead.
    """
    step = files.last_step(schema.STEPS.name)
    is_evaluated = is_due(step, EVAL_STEPS) and not is_due(step, SAVE_STEPS)
    return step if is_evaluated and step > files.last_step(schema.EVALUATIONS.name) else 0


def wait_for_rank(job: TorchrunJob, rank: int, restarts: int, *, files: RunFiles) -> psutil.Process | None:
    """Return the process of a rank after so many restarts as soon as it exists, or None if the job ends first."""
    process = job.wait_until(lambda: job.find_rank(rank, restarts))
    if process is not None:
        files.ranks_restarted()
    return process


def kill(target: psutil.Process, job: TorchrunJob, files: RunFiles, *, moment: Moment) -> bool:
    """Wait for the moment and kill the rank; return False if the rank ended before."""
    while job.running and target.is_running():
        if moment.condition(files):
            time.sleep(moment.delay)
            with suppress(psutil.Error):
                if target.status() == psutil.STATUS_ZOMBIE:
                    return False
                target.suspend()  # so that the moment cannot pass between the check and the kill
                if moment.condition(files):
                    target.kill()
                    return True
                target.resume()
        time.sleep(0.002)  # a checkpoint may be in its staging directory for a few milliseconds only
    return False
