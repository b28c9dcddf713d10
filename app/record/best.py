"""The best weights so far, for `--load_best_model_at_end`: `checkpoints/best-<step>/`, next to the checkpoints."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

from ..checkpoint.manager import CheckpointManager, latest_first, problem_of, step_of
from ..checkpoint.state import TrainingState
from ..common.errors import RunError, UserError
from ..common.files import commit, remove
from ..common.formats import labeled
from ..distributed.collectives import raise_if_any_failed
from ..runs.schema import BEST_PREFIX
from ..settings import Settings


class BestWeights:
    """The weights after the best evaluation so far, which follows from the lines of evaluations.jsonl alone."""

    def __init__(self, checkpoints: CheckpointManager, settings: Settings, evaluations: list[dict[str, Any]]) -> None:
        self.checkpoints, self.evaluations = checkpoints, evaluations
        self.enabled, self.metric = settings.load_best_model_at_end, settings.metric_for_best_model

    def best(self, up_to: float = math.inf) -> Path | None:
        """Return the folder of the best weights up to a step, of equal ones the first; None without any."""
        sign = 1 if self.metric == "loss" else -1
        saved = [line for line in self.evaluations if line["step"] <= up_to and "weights" not in line]
        best = min(saved, key=lambda line: sign * line[self.metric], default=None)
        return self.checkpoints.folder / f"{BEST_PREFIX}{best['step']}" if best and self.enabled else None

    def check(self, checkpoint: Path) -> None:
        """Check the best weights before a checkpoint, if any.

        Raises:
            UserError: they are damaged.
        """
        if (folder := self.best()) is not None:
            source = checkpoint.with_name(folder.name)
            if (problem := problem_of(source)) is not None:
                raise UserError(f"cannot resume from {checkpoint}: {source}, the best weights before it: {problem}")

    def take_over(self, checkpoint: Path) -> None:
        """Copy the best weights before a checkpoint of another run. Call it on rank 0."""
        folder = self.best()
        if folder is not None and not folder.exists():
            staging = folder.with_name(f".{folder.name}.tmp")
            shutil.copytree(checkpoint.with_name(folder.name), staging, dirs_exist_ok=True)
            commit(staging, folder)

    def add(self, evaluation: dict[str, Any], state: TrainingState) -> None:
        """Add an evaluation, and save the weights if it is the best one. Collective."""
        before = self.best()
        self.evaluations.append(evaluation)
        best = self.best()
        if best is not None and best != before:
            saved = self.checkpoints.save(best.name, lambda folder: state.save(folder, weights_only=True))
            if not saved:
                evaluation["weights"] = "could not be written"  # evaluations.jsonl says so, too

    def remove_unused(self) -> None:
        """Remove weights that are neither the best nor needed to resume from a checkpoint. Call it on rank 0."""
        folder = self.checkpoints.folder
        used = [self.best(step) for step in (math.inf, *map(step_of, latest_first(folder)))]
        for path in [path for path in folder.glob(f"{BEST_PREFIX}*") if path not in used]:
            remove(path)

    def load(self, state: TrainingState) -> None:
        """Load the best weights, if requested and there are any. Collective.

        Raises:
            RunError: the weights are damaged.
        """
        if (folder := self.best()) is None:
            return
        world = self.checkpoints.world
        problem = problem_of(folder) if world.is_main_process else None
        raise_if_any_failed(problem and f"{folder}: the best weights are damaged: {problem}", world, RunError)
        state.load(folder, weights_only=True)
        world.print_main(labeled("best weights", folder))
