"""Measure what `--ddp_comm_hook` does: the time of a training step, the bytes that it sends, and the accuracy."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tqdm import tqdm

from ...common.errors import UserError
from ...common.progress import hides_progress
from ...data.sampler import plan_batches
from ...ddp_loop import evaluate
from ...distributed.world import World
from ...settings import Settings
from ...training.build import ReviewData, build_data, build_model
from ...training.optim import build_optimizer, build_scheduler, default_learning_rate
from ..count_collectives import STEPS, count_third_step, sent_bytes
from ..harness import distribute
from .step_variants import Variant, compare, models, plain_ddp

HOOKS = ("no", "fp16", "bf16", "power_sgd")  # the values of --ddp_comm_hook
MOST_STEPS = 150  # of a training, unless --max_steps is set


@dataclass(frozen=True)
class Measured:
    """The measurements with one hook.

    Attributes:
        seconds: per training step, in each round, on the slowest rank.
        sent: bytes that a rank sends per step.
        accuracies: of the test rows, with each seed.
    """

    seconds: Sequence[float]
    sent: float
    accuracies: list[float]


def settings_by_hook(settings: Settings, seeds: int, *, n_train: int, ranks: int) -> tuple[dict[str, Settings], str]:
    """Return the settings of a training with each hook, and why PowerSGD is left out, or "" if it is not.

    The strategy is `ddp`, unless it is `zero1`, which has these hooks as well.

    Args:
        seeds: how many there will be, from `settings.seed` up.
        n_train: number of training rows.

    Raises:
        UserError: a seed is too large, or the batch cannot be divided.
    """
    settings = replace(plain_ddp(settings), strategy="zero1" if settings.strategy == "zero1" else "ddp")
    replace(settings, seed=settings.seed + seeds - 1)  # raises if it is too large
    by_hook, refusal = {}, ""
    for hook in HOOKS:
        try:
            hooked = replace(settings, ddp_comm_hook=hook)  # type: ignore[arg-type]
            plan_batches(hooked, n_train, ranks)
            by_hook[hook] = hooked
        except UserError as problem:
            if hook != "power_sgd":
                raise
            refusal = str(problem)
    return by_hook, refusal


def measure_hooks(
    by_hook: Mapping[str, Settings], data: ReviewData, *, seeds: int, seconds: float, world: World
) -> tuple[dict[str, Measured], int]:
    """Time the training step with each hook, count its bytes, and train with each hook and seed. Collective.

    Args:
        by_hook: the settings of the trainings, which differ in the hook only; `seed` is the first seed.
        data: of the first seed, also for the timed steps.
        seeds: how many.
        seconds: about how long to time the step with each hook.

    Returns:
        The measurements by hook, and the number of steps of a training.
    """
    settings = next(iter(by_hook.values()))
    # PowerSGD compresses from the third step on, because 10% of so few steps is less than its minimum of 2. A call that
    # is timed is preceded by two others.
    short = {hook: replace(hooked, max_steps=STEPS) for hook, hooked in by_hook.items()}
    variants = {hook: Variant(hooked) for hook, hooked in short.items()}
    comparison = compare(models(settings)[0], variants, data, seconds=seconds, world=world)
    gc.collect()  # DDP's modules are part of reference cycles, and each holds a complete model
    sent = {hook: count_sent(hooked, data, world) for hook, hooked in short.items()}
    gc.collect()
    accuracies: dict[str, list[float]] = {hook: [] for hook in by_hook}
    hide_bar = hides_progress(settings.disable_tqdm, world.is_main_process)
    with tqdm(total=seeds * len(by_hook), unit=" trainings", disable=hide_bar, leave=False) as bar:
        for seed in range(settings.seed, settings.seed + seeds):
            if seed != settings.seed:  # its data is what the steps were timed with
                data = build_data(replace(settings, seed=seed, disable_tqdm=True), world)
            for hook, hooked in by_hook.items():
                accuracies[hook].append(train(replace(hooked, seed=seed), data, world))
                gc.collect()
                bar.update()
    measured = {hook: Measured(comparison.seconds[hook], sent[hook], accuracies[hook]) for hook in by_hook}
    return measured, training_steps(settings, data)


def count_sent(settings: Settings, data: ReviewData, world: World) -> float:
    """Return the bytes that a rank sends in the third training step, on average over the ranks. Collective."""
    bench = distribute(settings, data, build_model(settings, data, world).model, world=world)
    return sent_bytes(count_third_step(bench), world.topology)


def training_steps(settings: Settings, data: ReviewData) -> int:
    return settings.max_steps if settings.max_steps > 0 else min(MOST_STEPS, data.plan.total_steps)


def train(settings: Settings, data: ReviewData, world: World) -> float:
    """Train as `app.ddp_loop` does, and return the accuracy of the test rows. Collective."""
    classifier = build_model(settings, data, world)
    settings = replace(
        settings,
        max_steps=training_steps(settings, data),
        learning_rate=settings.learning_rate or default_learning_rate(classifier.pretrained),
    )
    assert settings.learning_rate is not None
    bench = distribute(settings, data, classifier.model, world=world)
    optimizer = build_optimizer(bench.wrapped, settings, settings.learning_rate, strategy=bench.strategy)
    bench.train_without_record(optimizer, build_scheduler(optimizer, settings, bench.data.plan.total_steps))
    scores, _ = evaluate(classifier.model, data.eval_set("test", settings, world), settings, world=world)
    return scores.accuracy
