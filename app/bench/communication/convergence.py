"""The section of the laboratory on what skipped synchronization costs: losses and accuracies after as many examples.

Exchanging gradients for every k-th micro-batch makes the batch k times as large, and the updates k times as few.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure as Canvas
from tqdm import tqdm

from ...common.charts import SERIES_COLORS, render_svg
from ...common.terminal import hides_progress
from ...data.sampler import plan_batches
from ...distributed.collectives import raise_on_all_ranks
from ...distributed.world import World
from ...report.statistics import paired
from ...settings import Settings
from ...training.build import ReviewData, build_data
from ...training.step import default_learning_rate
from ..page import Figure, Part, Section, Table
from ..steps import plain_ddp
from .training_step import SYNC_EVERY
from .trainings import Training, accuracy_chart, describe_difference, interval_of, train

MICRO_BATCHES = 160  # of a training on each rank, unless --max_steps is set
POINTS = 20  # of a loss curve
EVERY_ONE = "every one"
TITLE = "Skipped synchronization: convergence"
ABOUT = (
    "Trainings on {examples} rows each, for {seeds} seed(s), in which gradients are exchanged for every k-th "
    "micro-batch: docs/communication.md#does-skipped-synchronization-converge explains them."
)


def variants_of(settings: Settings, n_train: int, ranks: int, *, pretrained: bool) -> dict[str, Settings]:
    """Return the settings of the trainings, which see the same number of rows, as far as a batch has enough of them.

    Raises:
        UserError: the batch cannot be divided.
    """
    plain = replace(plain_ddp(settings), logical_ranks=None)
    plan = plan_batches(plain, n_train, ranks)
    rows = plan.global_size // plan.accumulation_steps
    rate = settings.learning_rate or default_learning_rate(pretrained)
    most = max(SYNC_EVERY)
    micro_batches = max(1, (settings.max_steps if settings.max_steps > 0 else MICRO_BATCHES) // most) * most
    plain = replace(plain, per_device_train_batch_size=None)
    variants = {}
    for k in (k for k in SYNC_EVERY if k * rows <= n_train):
        steps: dict[str, Any] = {
            "train_batch_size": k * rows,
            "gradient_accumulation_steps": k,
            "max_steps": micro_batches // k,
        }
        name = EVERY_ONE if k == 1 else f"every {k}"
        variants[name] = replace(plain, learning_rate=rate, **steps)
        if k > 1:
            variants[f"{name}, lr × {k}"] = replace(plain, learning_rate=k * rate, **steps)
    for varied in variants.values():
        plan_batches(varied, n_train, ranks)
    return variants


def measure_convergence(settings: Settings, data: ReviewData, seeds: int, *, pretrained: bool, world: World) -> Section:
    """Train with each variant and seed. Collective."""
    with raise_on_all_ranks(world):
        variants = variants_of(settings, len(data.split.train), world.size, pretrained=pretrained)
        replace(settings, seed=settings.seed + seeds - 1)  # raises if it is too large
    trainings: dict[str, list[Training]] = {name: [] for name in variants}
    hide_bar = hides_progress(settings.disable_tqdm, world.is_main_process)
    with tqdm(total=seeds * len(variants), unit=" runs", disable=hide_bar, leave=False) as bar:
        for seed in range(settings.seed, settings.seed + seeds):
            if seed != settings.seed:
                data = build_data(replace(settings, seed=seed, disable_tqdm=True), world)
            for name, varied in variants.items():
                trainings[name].append(train(replace(varied, seed=seed), data, world))
                gc.collect()  # DDP's modules are part of reference cycles
                bar.update()
    return as_section(variants, trainings, draw=world.is_main_process)


def as_section(variants: Mapping[str, Settings], trainings: Mapping[str, Sequence[Training]], *, draw: bool) -> Section:
    accuracies = {name: [training.accuracy for training in several] for name, several in trainings.items()}
    effects = {name: paired(values, accuracies[EVERY_ONE]) for name, values in accuracies.items()}
    first = variants[EVERY_ONE]
    examples, seeds = first.train_batch_size * first.max_steps, len(accuracies[EVERY_ONE])
    curves = {
        name: loss_curve([training.losses for training in several], variants[name].train_batch_size)
        for name, several in trainings.items()
    }
    rows = []
    for name, effect in effects.items():
        difference = "" if name == EVERY_ONE else describe_difference(effect)
        rows.append(
            [name, str(variants[name].max_steps), f"{curves[name][-1][1]:.4f}", f"{effect.mean_a:.2%}", difference]
        )
    header = ["gradients exchanged", "updates", "last loss", "accuracy", "difference, points"]
    parts: list[Part] = [Table("Losses and accuracies", header, rows)]
    if draw:
        note = "Averaged over the seeds; each point also over the same number of rows before it."
        parts.append(Figure("Loss", curves_chart(curves), note))
        if seeds > 1:
            note = "Each dot is one seed; the line is the mean with its 95% confidence interval over the seeds."
            parts.append(Figure(f"Accuracy compared with {EVERY_ONE}", accuracy_chart(accuracies, effects), note))
    data = {
        name: {
            "learning_rate": variants[name].learning_rate,
            "losses": [training.losses for training in several],
            "accuracies": accuracies[name],
            "interval": interval_of(effects[name]),
            "p_value": effects[name].p_value,
        }
        for name, several in trainings.items()
    }
    return Section("convergence", TITLE, [ABOUT.format(examples=examples, seeds=seeds)], parts, data)


def loss_curve(losses: Sequence[Sequence[float]], rows: int) -> list[tuple[int, float]]:
    """Return points (rows seen, mean loss since the point before), averaged over seeds.

    Args:
        losses: of each seed, by step.
        rows: of a step.
    """
    by_step = [statistics.mean(of_seeds) for of_seeds in zip(*losses, strict=True)]
    n = min(POINTS, len(by_step))
    ends = [len(by_step) * (i + 1) // n for i in range(n)]
    return [(rows * end, statistics.mean(by_step[begin:end])) for begin, end in zip([0, *ends], ends, strict=False)]


def curves_chart(curves: Mapping[str, Sequence[tuple[int, float]]]) -> Markup:
    def draw(canvas: Canvas) -> None:
        axes = canvas.add_subplot(xlabel="rows", ylabel="loss")
        for color, (name, points) in zip(SERIES_COLORS, curves.items(), strict=False):
            dashes = (0, (4, 2)) if "lr" in name else "-"
            axes.plot(*zip(*points, strict=True), color=color, linestyle=dashes, linewidth=1.6, label=name)
        canvas.legend(loc="outside lower center", ncols=3)

    return render_svg(330, "Loss over rows", draw)
