"""The best weights so far, for `--load_best_model_at_end`: `checkpoints/best-<step>/`, next to the checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from ..checkpoint.manager import CheckpointManager, latest_first, problem_of, remove
from ..checkpoint.state import load_complete_weights, write_weights
from ..common.errors import RunError
from ..common.formats import labeled
from ..distributed.collectives import first_failure
from ..model.vocabulary import complete_state
from ..runs.schema import BEST_PREFIX, MODEL, RUN_STATE
from ..strategies.base import Strategy, Tensors
from .run_folder import RunFolder


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


class BestWeights:
    """Keep the weights after the evaluation with the best validation metric so far. Every rank holds one."""

    def __init__(self, run_folder: RunFolder, checkpoints: CheckpointManager, best: Best) -> None:
        settings = run_folder.info.settings
        self.enabled, self.metric = settings.load_best_model_at_end, settings.metric_for_best_model
        self.checkpoints, self.run_folder, self.best = checkpoints, run_folder, best

    def keep(self, step: int, strategy: Strategy, model: torch.nn.Module, *, metrics: Mapping[str, float]) -> None:
        """Save the weights if the validation metric is better than after all earlier steps. Collective."""
        if not (self.enabled and self.best.is_improved_by(metrics[self.metric], self.metric)):
            return
        before, self.best = self.best, Best(step, metrics[self.metric])
        state = strategy.gather_model_state(model)
        if self.checkpoints.world.is_main_process:
            state = complete_state(model, state)
        if not self.run_folder.is_reset:  # the next step changes the weights before they are written
            state = {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}
        self.run_folder.write_after_reset(lambda: self._save(state, before))

    def _save(self, state: Tensors, before: Best) -> None:
        """Write the weights, and remove those that they replace. If that fails, `before` stays the best. Collective."""
        is_main = self.checkpoints.world.is_main_process

        def fill(folder: Path) -> None:
            if is_main:
                write_weights(folder, state)

        if not self.checkpoints.save(self.best.name, fill, (MODEL,)):
            self.best = before
        elif is_main:
            remove_unused_best(self.checkpoints.folder, self.best)

    def load(self, model: torch.nn.Module, last_step: int) -> None:
        """Load the best weights into the model, or the rank's shards, if requested and there are any. Collective.

        Args:
            last_step: the step after which the model has its present weights.

        Raises:
            RunError: the weights are damaged.
        """
        if not self.enabled or not self.best.step:
            return
        world, folder = self.checkpoints.world, self.checkpoints.folder / self.best.name
        if self.run_folder.is_reset or self.best.step != last_step:  # otherwise the model has them, not saved yet
            problem = problem_of(folder) if world.is_main_process else None
            if (problem := first_failure(problem, world)) is not None:
                raise RunError(f"{folder}: the best weights are damaged: {problem}")
            load_complete_weights(folder, model)
        metric = f"validation {self.metric} {self.best.value:.4f}"
        world.print_main(labeled("best weights", f"of step {self.best.step}: {metric}"))


def remove_unused_best(checkpoints: Path, best: Best) -> None:
    """Remove the best weights that are neither `best` nor needed to resume from a checkpoint.

    Call it on rank 0.
    """
    used = {best.name}
    for checkpoint in latest_first(checkpoints):
        # A damaged checkpoint needs none: it cannot be resumed.
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            step = json.loads((checkpoint / RUN_STATE).read_text(encoding="utf-8"))["best"]["step"]
            used.add(Best(step).name)
    for folder in checkpoints.glob(f"{BEST_PREFIX}*"):
        if folder.name not in used:
            remove(folder)
