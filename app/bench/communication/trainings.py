"""Trainings of the laboratory: their losses and accuracies, and how these compare over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from markupsafe import Markup
from matplotlib.figure import Figure as Canvas

from ...common.charts import NEUTRAL, SERIES_COLORS, draw_ranges, name_rows, render_svg
from ...ddp_loop import evaluate
from ...distributed.collectives import all_gather_object
from ...distributed.world import World
from ...report.statistics import Paired
from ...settings import Settings
from ...training.build import ReviewData, build_model
from ...training.step import default_learning_rate
from ..steps import distribute


@dataclass(frozen=True)
class Training:
    """The result of a training."""

    accuracy: float  # of the test rows
    losses: list[float]  # of each step, averaged over its rows


def train(settings: Settings, data: ReviewData, world: World) -> Training:
    """Train as `app.ddp_loop` does, for the `max_steps` of the settings. Collective."""
    classifier = build_model(settings, data, world)
    bench = distribute(settings, data, classifier.model, world=world)
    rate = settings.learning_rate or default_learning_rate(classifier.pretrained)
    own = torch.stack(bench.train_without_record(rate)).mean(dim=1).tolist()
    losses = [statistics.mean(of_ranks) for of_ranks in zip(*all_gather_object(own, world), strict=True)]
    scores, _ = evaluate(classifier.model, data.eval_set("test", settings, world), settings, world=world)
    return Training(scores.accuracy, losses)


def interval_of(effect: Paired) -> tuple[float, float] | None:
    """Return the limits of the confidence interval of a difference, if there is one."""
    return (effect.difference.low, effect.difference.high) if effect.difference else None


def describe_difference(effect: Paired) -> str:
    """Return a difference in percentage points with its interval."""
    difference = f"{100 * (effect.mean_a - effect.mean_b):+z.2f}"
    limits = interval_of(effect)
    return f"{difference} [{100 * limits[0]:+z.2f}, {100 * limits[1]:+z.2f}]" if limits else difference


def accuracy_chart(accuracies: Mapping[str, Sequence[float]], effects: Mapping[str, Paired]) -> Markup:
    """Plot the differences from the first accuracies over seeds, in percentage points, with their intervals."""
    baseline, *names = accuracies

    def draw(canvas: Canvas) -> None:
        axes = canvas.add_subplot(xlabel="percentage points")
        axes.axvline(0, color=NEUTRAL, linewidth=1)
        for row, name in enumerate(names):
            pairs = zip(accuracies[name], accuracies[baseline], strict=True)
            differences = [100 * (accuracy - other) for accuracy, other in pairs]
            axes.plot(differences, [row] * len(differences), "o", color=SERIES_COLORS[1], markersize=6, alpha=0.7)
            mean = statistics.mean(differences)
            low, high = (100 * limit for limit in interval_of(effects[name]) or (mean / 100, mean / 100))
            bar: dict[str, Any] = {"marker": "|", "color": SERIES_COLORS[0], "markersize": 18, "markeredgewidth": 2.5}
            draw_ranges(axes, [row], [(mean, low, high)], horizontal=True, **bar)
        name_rows(axes, names)
        axes.grid(visible=False)

    return render_svg(70 + 40 * len(names), f"Difference of the accuracy from {baseline}", draw)
