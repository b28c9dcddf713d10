"""Benchmark: the fixed order of additions compared with DDP's plain all-reduce, in complete training steps.

    torchrun --nproc_per_node=2 -m app.bench.reduction --csv reviews.csv
    torchrun --nproc_per_node=4 -m app.bench.reduction --csv reviews.csv --threads 1

Trains the embedded model and a BERT of 4 layers x 312 with plain all-reduce, with as many logical ranks as processes,
and with twice as many. Rounds of the three alternate, so that all are affected if the machine slows down. The result is
the median of the rounds' ratios. Any training flag applies to all of them.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial

from torch.nn.parallel import DistributedDataParallel

from app.bench.harness import build_named, distribute, timed
from app.cli import launch
from app.distributed.process_group import join
from app.distributed.world import World
from app.settings import Settings
from app.strategies.ddp import DDP
from app.training.build import ReviewData, build_data
from app.training.console import quiet_libraries
from app.training.optim import build_optimizer, build_scheduler

ROUNDS = 9
STEPS = {"embedded model": 20, "BERT 4 x 312": 5}  # optimizer steps per round
LEARNING_RATE = 1e-4


class PlainDDP(DDP):
    """DDP without logical ranks: its own all-reduce at any number of processes."""

    def fix_order(self, wrapped: DistributedDataParallel) -> None:
        """Keep DDP's all-reduce."""


def main(settings: Settings) -> None:
    with join(settings) as world:
        quiet_libraries(world)
        data = build_data(settings, world)
        for name, steps in STEPS.items():
            benchmark(name, steps, settings, data, world)


def benchmark(name: str, steps: int, settings: Settings, data: ReviewData, world: World) -> None:
    """Time the three kinds of steps in alternating rounds, and print the ratios."""
    variants = {
        "plain all-reduce": distribute(settings, data, build_named(name, settings, data, world), world, PlainDDP),
        **{
            f"{v} logical ranks": distribute(
                replace(settings, logical_ranks=v), data, build_named(name, settings, data, world), world
            )
            for v in (world.size, 2 * world.size)
        },
    }
    optimizers = {key: build_optimizer(x.wrapped, settings, LEARNING_RATE, x.strategy) for key, x in variants.items()}
    seconds: dict[str, list[float]] = {key: [] for key in variants}
    for round_number in range(ROUNDS + 1):  # the first one warms up
        for key, variant in variants.items():
            scheduler = build_scheduler(optimizers[key], settings, steps)
            variant.loader.sampler.set_epoch(round_number)  # type: ignore[attr-defined]
            took = timed(partial(variant.train_steps, variant.loader, optimizers[key], scheduler, steps), world)
            if round_number:
                seconds[key].append(took / steps)
    plain = seconds["plain all-reduce"]
    for key, times in seconds.items():
        ratios = sorted(a / b - 1 for a, b in zip(times, plain, strict=True))
        world.print_main(
            f"{name}, {world.size} rank(s), {key:>16}: median {1000 * statistics.median(times):7.1f} ms per step, "
            f"{statistics.median(ratios):+.1%} (from {ratios[0]:+.1%} to {ratios[-1]:+.1%} over {ROUNDS} rounds)"
        )


if __name__ == "__main__":
    launch(main, __doc__)
