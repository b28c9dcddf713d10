"""The best weights so far, for `--load_best_model_at_end`: `checkpoints/best-<step>/`, next to the checkpoints."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from ..common.errors import RunError, UserError
from ..common.files import commit
from ..distributed.collectives import first_failure
from ..distributed.world import World
from ..runs.schema import BEST_PREFIX, MODEL, RUN_STATE
from ..strategies.base import Tensors
from .manager import CheckpointManager, latest_first, problem_of, remove
from .state import load_complete_weights, write_weights


@dataclass(frozen=True)
class Best:
    """The step after which the validation metric was best so far, and its value. Step 0 means not evaluated yet."""

    step: int = 0
    value: float | None = None

    @property
    def name(self) -> str:
        """The name of the folder that holds the weights."""
        return f"{BEST_PREFIX}{self.step}"

    def is_improved_by(self, value: float, metric: str) -> bool:
        """Return whether a value of the metric is strictly better. Of equal values the first one stays the best."""
        if self.value is None:
            return True
        return value < self.value if metric == "loss" else value > self.value


def save_best(checkpoints: CheckpointManager, best: Best, improved: Best, *, state: Tensors) -> Best:
    """Save the best weights so far, and remove those that they replace. Collective.

    Args:
        best: the best step until now.
        improved: the step after which the model was better.
        state: on rank 0, the model's complete state dict after that step.

    Returns:
        `improved`, or `best` if the weights could not be written and the run continues regardless.
    """

    def fill(folder: Path) -> None:
        if checkpoints.world.is_main_process:
            write_weights(folder, state)

    if not checkpoints.save(improved.name, fill, (MODEL,)):
        return best
    if checkpoints.world.is_main_process:
        remove_unused_best(checkpoints.folder, improved)
    return improved


def load_best(checkpoints: Path, best: Best, model: torch.nn.Module, *, world: World) -> None:
    """Load the best weights into the model, or into the shards of it that this rank holds. Collective.

    Args:
        checkpoints: the folder of the checkpoints.

    Raises:
        RunError: the weights are damaged.
    """
    folder = checkpoints / best.name
    problem = problem_of(folder) if world.is_main_process else None
    if (problem := first_failure(problem, world)) is not None:
        raise RunError(f"{folder}: the best weights are damaged: {problem}")
    load_complete_weights(folder, model)


def copy_best(source: Path | None, run: Path, checkpoints: Path) -> None:
    """Copy the best weights of another run, whose checkpoint a new run resumes from. Call it on rank 0.

    Args:
        source: the `best-<step>` folder next to that checkpoint, which may be this run's own; None without one.
        run: the folder of the new run.
        checkpoints: the folder of its checkpoints.

    Raises:
        UserError: another job has removed the folder.
    """
    if source is None:
        return
    target, staging = checkpoints / source.name, run / ".best.tmp"
    if source.resolve() != target.resolve():
        shutil.rmtree(staging, ignore_errors=True)
        try:
            shutil.copytree(source, staging)
        except OSError:
            if not source.is_dir():
                raise UserError(f"{source}: has been removed since this run was started") from None
            raise
        checkpoints.mkdir(exist_ok=True)
        commit(staging, target)


def remove_unused_best(checkpoints: Path, best: Best) -> None:
    """Remove all best weights except those of `best` and those that resuming from a checkpoint would need.

    Call it on rank 0.
    """
    used = {best.name}
    for checkpoint in latest_first(checkpoints):
        # A damaged checkpoint needs none: it can't be resumed.
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            step = json.loads((checkpoint / RUN_STATE).read_text(encoding="utf-8"))["best"]["step"]
            used.add(Best(step).name)
    for folder in checkpoints.glob(f"{BEST_PREFIX}*"):
        if folder.name not in used:
            remove(folder)
