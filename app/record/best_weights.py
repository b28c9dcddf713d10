"""The best weights of a run in progress (`--load_best_model_at_end`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..checkpoint.best import Best, load_best, save_best
from ..checkpoint.manager import CheckpointManager
from ..settings import Settings
from ..strategies.base import Strategy
from .reset import FolderReset


class BestWeights:
    """Keep the weights after the evaluation with the best validation metric so far. Every rank holds one.

    Attributes:
        best: the step of these weights, and their metric.
    """

    def __init__(self, settings: Settings, checkpoints: CheckpointManager, reset: FolderReset, *, best: Best) -> None:
        self.enabled, self.metric = settings.load_best_model_at_end, settings.metric_for_best_model
        self.checkpoints, self.reset, self.best = checkpoints, reset, best

    def keep(self, step: int, strategy: Strategy, model: torch.nn.Module, *, metrics: Mapping[str, float]) -> None:
        """Save the weights if the validation metric is better than after all earlier steps. Collective."""
        if not (self.enabled and self.best.is_improved_by(metrics[self.metric], self.metric)):
            return
        before, self.best = self.best, Best(step, metrics[self.metric])
        state = strategy.gather_model_state(model)
        if not self.reset.is_done:  # the next step changes the weights before they are written
            state = {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}

        def save() -> None:
            self.best = save_best(self.checkpoints, before, self.best, state=state)

        self.reset.write_after(save)

    def load(self, model: torch.nn.Module, last_step: int) -> None:
        """Load the best weights into the model, if that is requested and there are any. Collective.

        Args:
            last_step: the step after which the model has its present weights.

        Raises:
            RunError: the weights are damaged.
        """
        if not self.enabled or not self.best.step:
            return
        world = self.checkpoints.world
        if self.reset.is_done or self.best.step != last_step:  # otherwise the model has them, not saved yet
            load_best(self.checkpoints.folder, self.best, model, world=world)
        metric = f"validation {self.metric} {self.best.value:.4f}"
        world.print_main(f"{'best weights':>14}  of step {self.best.step}: {metric}")
