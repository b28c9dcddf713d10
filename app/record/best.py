"""The best weights so far, for `--load_best_model_at_end`: `checkpoints/best-<step>/`, next to the checkpoints."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.manager import CheckpointManager, latest_first, problem_of, step_of
from ..checkpoint.state import TrainingState
from ..common.errors import RunError, UserError
from ..common.files import commit, remove
from ..common.formats import labeled
from ..distributed.collectives import first_failure
from ..runs.schema import BEST_PREFIX
from ..settings import Settings

Evaluation = Mapping[str, Any]  # a line of evaluations.jsonl


def best_of(evaluations: Iterable[Evaluation], metric: str) -> Evaluation | None:
    """Return the best of some lines of evaluations.jsonl; of equal ones the first."""
    sign = 1 if metric == "loss" else -1
    return min(evaluations, key=lambda line: sign * line[metric], default=None)


class BestWeights:
    """The weights after the best evaluation so far, which follows from the lines of evaluations.jsonl alone."""

    def __init__(self, checkpoints: CheckpointManager, settings: Settings, evaluations: list[Evaluation]) -> None:
        """`evaluations` are those of the run so far, to which it adds."""
        self.checkpoints, self.evaluations = checkpoints, evaluations
        self.enabled, self.metric = settings.load_best_model_at_end, settings.metric_for_best_model
        self.unsaved: list[Evaluation] = []  # those whose weights could not be written

    def best(self, up_to: float = math.inf) -> Evaluation | None:
        """Return the best evaluation up to a step whose weights are kept; None without any."""
        saved = [line for line in self.evaluations if line["step"] <= up_to and line not in self.unsaved]
        return best_of(saved, self.metric) if self.enabled else None

    def take_over(self, checkpoint: Path) -> None:
        """Check the best weights before a checkpoint, and copy those of another run. Call it on rank 0.

        Raises:
            UserError: they are damaged.
            OSError: they cannot be copied.
        """
        if (best := self.best()) is None:
            return
        source, target = (folder / name_of(best) for folder in (checkpoint.parent, self.checkpoints.folder))
        if (problem := problem_of(source)) is not None:
            raise UserError(f"cannot resume from {checkpoint}: {source}, the best weights before it: {problem}")
        if not target.exists():
            staging = target.with_name(f".{target.name}.tmp")
            shutil.copytree(source, staging, dirs_exist_ok=True)
            commit(staging, target)

    def keep(self, state: TrainingState) -> None:
        """Save the weights if the last evaluation is the best one. Collective."""
        best = self.best()
        if best is not None and best is self.evaluations[-1]:
            saved = self.checkpoints.save(name_of(best), lambda folder: state.save(folder, weights_only=True))
            self.unsaved += [] if saved else [best]

    def remove_unused(self) -> None:
        """Remove weights that are neither the best nor needed to resume from a checkpoint. Call it on rank 0."""
        folder = self.checkpoints.folder
        best = [self.best(step) for step in (math.inf, *map(step_of, latest_first(folder)))]
        used = {name_of(evaluation) for evaluation in best if evaluation is not None}
        for path in [path for path in folder.glob(f"{BEST_PREFIX}*") if path.name not in used]:
            remove(path)

    def load(self, state: TrainingState) -> None:
        """Load the best weights, if requested and there are any. Collective.

        Raises:
            RunError: the weights are damaged.
        """
        if (best := self.best()) is None:
            return
        folder, world = self.checkpoints.folder / name_of(best), self.checkpoints.world
        problem = problem_of(folder) if world.is_main_process else None
        if (problem := first_failure(problem, world)) is not None:
            raise RunError(f"{folder}: the best weights are damaged: {problem}")
        state.load(folder, weights_only=True)
        score = f"validation {self.metric} {best[self.metric]:.4f}"
        world.print_main(labeled("best weights", f"of step {best['step']}: {score}"))


def name_of(evaluation: Evaluation) -> str:
    """Return the name of the folder that holds the weights after an evaluation."""
    return f"{BEST_PREFIX}{evaluation['step']}"
