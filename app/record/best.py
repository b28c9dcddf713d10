"""The best weights so far, for `--load_best_model_at_end`: `checkpoints/best-<step>/`, next to the checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ..checkpoint.manager import CheckpointManager, latest_first, problem_of, remove, step_of
from ..checkpoint.state import TrainingState
from ..common.errors import RunError, UserError
from ..common.files import commit
from ..common.formats import labeled
from ..distributed.collectives import first_failure
from ..runs.schema import BEST_PREFIX
from ..settings import Settings


class Best(NamedTuple):
    """The step after which the validation metric was best, and its value. Step 0 means not evaluated yet."""

    step: int = 0
    value: float | None = None

    @property
    def name(self) -> str:
        """The name of the folder that holds the weights."""
        return f"{BEST_PREFIX}{self.step}"


def best_of(lines: Iterable[str], metric: str, up_to: int | None = None) -> Best:
    """Return the best of the evaluations in some lines of evaluations.jsonl; of equal ones the first."""
    best = Best()
    for line in map(json.loads, lines):
        value = line[metric]
        better = best.value is None or (value < best.value if metric == "loss" else value > best.value)
        if better and (up_to is None or line["step"] <= up_to):
            best = Best(line["step"], value)
    return best


class BestWeights:
    """The weights after the best evaluation so far, which follows from the lines of evaluations.jsonl alone."""

    def __init__(self, checkpoints: CheckpointManager, settings: Settings, evaluations: list[str]) -> None:
        """`evaluations` are the lines of the run so far, to which it adds."""
        self.checkpoints, self.evaluations = checkpoints, evaluations
        self.enabled, self.metric = settings.load_best_model_at_end, settings.metric_for_best_model
        self.unsaved: list[str] = []  # lines of evaluations whose weights could not be written

    def best(self, up_to: int | None = None) -> Best:
        """Return the best evaluation, or the best one up to a step."""
        return best_of([line for line in self.evaluations if line not in self.unsaved], self.metric, up_to)

    def take_over(self, checkpoint: Path) -> None:
        """Check the best weights before a checkpoint, and copy those of another run. Call it on rank 0.

        Raises:
            UserError: they are damaged, or cannot be copied.
        """
        best = self.best()
        if not self.enabled or not best.step:
            return
        source, target = checkpoint.parent / best.name, self.checkpoints.folder / best.name
        if (problem := problem_of(source)) is not None:
            raise UserError(f"cannot resume from {checkpoint}: {source}, the best weights before it: {problem}")
        if source.resolve() != target.resolve():
            staging = target.with_name(f".{target.name}.tmp")
            try:
                shutil.copytree(source, staging, dirs_exist_ok=True)
                commit(staging, target)
            except OSError as failure:
                raise UserError(f"{target}: cannot be written: {failure.strerror or failure}") from None

    def keep(self, step: int, state: TrainingState) -> None:
        """Save the weights if the last evaluation, after this step, is the best one. Collective."""
        best = self.best()
        if self.enabled and best.step == step:
            saved = self.checkpoints.save(best.name, lambda folder: state.save(folder, weights_only=True))
            self.unsaved += [] if saved else self.evaluations[-1:]

    def remove_unused(self) -> None:
        """Remove weights that are neither the best nor needed to resume from a checkpoint. Call it on rank 0."""
        folder = self.checkpoints.folder
        used = {self.best(step).name for step in [None, *map(step_of, latest_first(folder))]}
        for path in [path for path in folder.glob(f"{BEST_PREFIX}*") if path.name not in used]:
            remove(path)

    def load(self, state: TrainingState) -> None:
        """Load the best weights, if requested and there are any. Collective.

        Raises:
            RunError: the weights are damaged.
        """
        best, world = self.best(), self.checkpoints.world
        if not self.enabled or not best.step:
            return
        folder = self.checkpoints.folder / best.name
        problem = problem_of(folder) if world.is_main_process else None
        if (problem := first_failure(problem, world)) is not None:
            raise RunError(f"{folder}: the best weights are damaged: {problem}")
        state.load(folder, weights_only=True)
        world.print_main(labeled("best weights", f"of step {best.step}: validation {self.metric} {best.value:.4f}"))
