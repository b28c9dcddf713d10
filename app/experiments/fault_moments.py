"""The moments at which fault injection kills a rank: random, recognized by the files that the run writes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..runs import schema

# Steps 6 to 24 have an evaluation and no checkpoint, 5 to 25 a checkpoint and no evaluation, 30 and 36 have both.
STEPS, SAVE_STEPS, EVAL_STEPS = 36, 5, 6

FileVersion = tuple[int, int] | None  # inode and modification time in ns; None if there is no such file


class RunFiles:
    """Observe a run's progress from outside, by its folder alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.versions_at_start: list[FileVersion] = [None, None]

    def ranks_restarted(self) -> None:
        """Ignore what earlier processes wrote: from now on, only new writes count as progress."""
        self.versions_at_start = self._versions()

    def is_training(self) -> bool:
        """Return whether the current processes have opened the run, that is, written one of its files."""
        return self._versions() != self.versions_at_start

    def last_step(self, log: str) -> int:
        """Return the step in the last line of a log, or 0 if there is none."""
        with suppress(OSError, IndexError, ValueError, KeyError, TypeError):
            return int(json.loads((self.folder / log).read_text().splitlines()[-1])["step"])
        return 0

    def checkpoint_in_staging(self) -> int:
        """Return the step of the checkpoint that is being written, or 0 if there is none."""
        with suppress(OSError, StopIteration):  # the staging directory may disappear while it is listed
            name = next(self.folder.glob("checkpoints/.*/checkpoint-*")).name
            return int(name.removeprefix("checkpoint-"))
        return 0

    def _versions(self) -> list[FileVersion]:
        versions: list[FileVersion] = []
        for name in (schema.SETTINGS.name, schema.STEPS.name):
            try:
                status = (self.folder / name).stat()
                versions.append((status.st_ino, status.st_mtime_ns))
            except OSError:
                versions.append(None)
        return versions


class Moment(NamedTuple):
    """Kill `delay` seconds after `condition` becomes true, if it is still true then."""

    condition: Callable[[RunFiles], bool]
    delay: float


# Each function draws a moment. `seconds` is the duration of an uninterrupted job.


def at_start_up(rng: random.Random, seconds: float) -> Moment:
    return Moment(lambda files: True, rng.uniform(0, 0.6 * seconds))


def in_a_step(rng: random.Random, seconds: float) -> Moment:
    step = rng.randrange(1, STEPS)
    return Moment(lambda files: files.is_training() and files.last_step(schema.STEPS.name) >= step, rng.uniform(0, 0.2))


def in_a_save(rng: random.Random, seconds: float) -> Moment:
    step = rng.randrange(1, STEPS)
    return Moment(lambda files: files.is_training() and files.checkpoint_in_staging() >= step, rng.uniform(0, 0.03))


def in_the_save_of_an_evaluation(rng: random.Random, seconds: float) -> Moment:
    """Kill while the checkpoint of a step that is also evaluated is being written."""
    both = [step for step in range(1, STEPS + 1) if is_due(step, EVAL_STEPS) and is_due(step, SAVE_STEPS)]
    return Moment(lambda files: files.is_training() and files.checkpoint_in_staging() in both, rng.uniform(0, 0.03))


def in_an_evaluation(rng: random.Random, seconds: float) -> Moment:
    """Kill after a step at which only an evaluation is due.

    The step's line is written before the evaluation and the evaluation's line after it. Steps that also save a
    checkpoint are left out: between their two lines, the checkpoint may be written instead.
    """
    first = rng.randrange(1, STEPS - SAVE_STEPS)

    def is_evaluating(files: RunFiles) -> bool:
        step = files.last_step(schema.STEPS.name)
        due = is_due(step, EVAL_STEPS) and not is_due(step, SAVE_STEPS)
        return files.is_training() and due and step >= first and step > files.last_step(schema.EVALUATIONS.name)

    return Moment(is_evaluating, rng.uniform(0, 0.05))


def before_the_exit(rng: random.Random, seconds: float) -> Moment:
    file = rng.choice([schema.METRICS.name, schema.PREDICTIONS, f".{schema.MODEL_FOLDER}.tmp"])
    return Moment(lambda files: files.is_training() and (files.folder / file).exists(), rng.uniform(0, 0.03))


def at_any_time(rng: random.Random, seconds: float) -> Moment:
    return Moment(lambda files: True, rng.uniform(0, seconds))


def is_due(step: int, every: int) -> bool:
    """Return whether an event that is due every `every` steps, and after the last step, is due after this step."""
    return step > 0 and (step % every == 0 or step == STEPS)


MOMENTS = (
    *(at_start_up, in_a_step, in_a_save, in_the_save_of_an_evaluation),
    *(in_an_evaluation, before_the_exit, at_any_time),
)
