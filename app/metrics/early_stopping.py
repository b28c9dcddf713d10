"""When to stop training early: `--early_stopping_patience` and `--early_stopping_threshold`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..settings import Settings


class EarlyStopping:
    """Counts the evaluations since the last improvement, as `transformers.EarlyStoppingCallback` does.

    It has no state but the evaluations so far, which evaluations.jsonl holds, so a resumed run stops after the same
    step. All ranks have the same scores, so they agree without communication.
    """

    def __init__(self, settings: Settings) -> None:
        self.patience, self.threshold = settings.early_stopping_patience, settings.early_stopping_threshold
        self.metric = settings.metric_for_best_model
        self.best: float | None = None
        self.evaluations = 0  # since the last improvement
        self.stops = False  # whether training ends; it stays true

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Take the scores of an evaluation into account."""
        if self.patience is None:
            return
        value = metrics[self.metric]
        gain = 0.0 if self.best is None else value - self.best
        gain = -gain if self.metric == "loss" else gain
        self.evaluations = 0 if self.best is None or gain > self.threshold else self.evaluations + 1
        if self.best is None or gain > 0:
            self.best = value
        self.stops = self.stops or self.evaluations >= self.patience

    def __str__(self) -> str:
        return f"stopped early: {self.metric} has not improved enough in {self.evaluations} evaluation(s) in a row"
