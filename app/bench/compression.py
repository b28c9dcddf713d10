"""Measure what `--ddp_comm_hook` does: the time of a training step, the bytes that it sends, and the accuracy."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from app.bench.harness import Bench, distribute, timed
from app.ddp_loop import evaluate
from app.distributed.collectives import raise_on_all_ranks
from app.distributed.world import World
from app.settings import Settings
from app.training.build import ReviewData, build_data, build_model
from app.training.console import quiet_libraries
from app.training.optim import build_optimizer, build_scheduler, default_learning_rate

HOOKS = ("no", "fp16", "bf16", "power_sgd")  # the values of --ddp_comm_hook
ROUNDS, STEPS = 7, 8  # timed steps per round
MOST_STEPS = 150  # of a training, unless --max_steps is set
# An all-reduce sends each element 2 (N - 1) / N times among N ranks. The other collectives here send half of that, on
# average over the ranks.
SENT_TWICE = ("allreduce_",)


@dataclass(frozen=True)
class Measured:
    """What was measured with one hook.

    Attributes:
        seconds: per training step, in each round.
        sent: bytes that a rank sends per step.
        accuracies: of the test rows, with each seed.
    """

    seconds: list[float]
    sent: float
    accuracies: list[float]


def measure_hooks(settings: Settings, world: World, seeds: int) -> tuple[dict[str, Measured], int]:
    """Time the training step with each hook, count its bytes, and train with each hook and seed. Collective.

    Args:
        settings: of all trainings; `seed` is the first seed.
        seeds: how many.

    Returns:
        What was measured, by hook, and the number of steps of a training.

    Raises:
        AgreedError: a user's mistake.
    """
    quiet_libraries(world)
    with raise_on_all_ranks(world):
        by_hook = {hook: replace(settings, ddp_comm_hook=hook) for hook in HOOKS}  # type: ignore[arg-type]
        replace(settings, seed=settings.seed + seeds - 1)  # raises if it is too large
    hide_bar = settings.disable_tqdm or not world.is_main_process
    seconds, sent = time_steps(by_hook, world, hide_bar)
    accuracies: dict[str, list[float]] = {hook: [] for hook in by_hook}
    with tqdm(total=seeds * len(by_hook), unit=" trainings", disable=hide_bar, leave=False) as bar:
        for seed in range(settings.seed, settings.seed + seeds):
            data = build_data(replace(settings, seed=seed, disable_tqdm=True), world)
            for hook, hooked in by_hook.items():
                accuracies[hook].append(train(replace(hooked, seed=seed), data, world))
                gc.collect()  # DDP's modules are part of reference cycles, and each holds a complete model
                bar.update()
    measured = {hook: Measured(seconds[hook], sent[hook], accuracies[hook]) for hook in by_hook}
    return measured, training_steps(settings, data)


def time_steps(
    by_hook: Mapping[str, Settings], world: World, hide_bar: bool
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the seconds per step in each round, and the bytes that a rank sends per step, by hook. Collective."""
    benches, trainings = {}, {}
    for hook, settings in by_hook.items():
        # PowerSGD compresses from the third step on, because the training ends with the tenth.
        short = replace(settings, max_steps=STEPS, disable_tqdm=True)
        data = build_data(short, world)
        bench = distribute(short, data, build_model(short, data, world).model, world)
        optimizer = build_optimizer(bench.wrapped, short, 1e-4, bench.strategy)
        benches[hook], trainings[hook] = bench, (optimizer, build_scheduler(optimizer, short, (ROUNDS + 2) * STEPS))
    seconds: dict[str, list[float]] = {hook: [] for hook in by_hook}
    timings = list(product(range(ROUNDS + 1), benches.items()))  # the first round warms up
    for round_number, (hook, bench) in tqdm(timings, "timing", unit=" rounds", disable=hide_bar, leave=False):
        bench.loader.sampler.set_epoch(round_number)  # type: ignore[attr-defined]
        took = timed(partial(bench.train_steps, bench.loader, *trainings[hook], STEPS), world)
        if round_number:
            seconds[hook].append(took / STEPS)
    sent = {hook: count_sent(bench, *trainings[hook]) for hook, bench in benches.items()}
    return seconds, sent


def count_sent(bench: Bench, optimizer: torch.optim.Optimizer, scheduler: Any) -> float:
    """Return the bytes that a rank sends in one training step, on average over the ranks. Collective."""
    with CountSent(bench.world.size) as counter:
        bench.train_steps(bench.loader, optimizer, scheduler, 1)
    sent: float = counter.sent
    return sent


class CountSent(TorchDispatchMode):
    """Count what the collectives in a block send, also those that DDP starts in C++."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.sent = ranks, 0.0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation. If it is a collective, count the tensor that it fills."""
        if operation.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
            times = 2 if operation.overloadpacket.__name__ in SENT_TWICE else 1
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.sent += times * (self.ranks - 1) / self.ranks * size
        return operation(*args, **(kwargs or {}))


def training_steps(settings: Settings, data: ReviewData) -> int:
    """Return the steps of a training."""
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
    bench = distribute(settings, data, classifier.model, world)
    plan = bench.data.plan
    optimizer = build_optimizer(bench.wrapped, settings, settings.learning_rate, bench.strategy)

    def micro_batches() -> Iterator[Any]:
        for epoch in range(plan.epochs):
            bench.loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            yield from islice(bench.loader, plan.steps_per_epoch * plan.micro_batches_per_step)

    scheduler = build_scheduler(optimizer, settings, plan.total_steps)
    bench.train_steps(micro_batches(), optimizer, scheduler, plan.total_steps)
    scores, _ = evaluate(classifier.model, data.eval_set("test", settings, world), settings, world)
    return scores.accuracy
