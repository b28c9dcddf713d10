"""What a checkpoint every 50 steps costs, on the same ranks, rows, model and batches.

Rounds of 50 steps with and without a checkpoint behind them alternate, in an order that alternates too, so that a
machine that gets slower in between slows both; what counts is the median of the rounds' ratios.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from benchmark import set_up, timed, train_steps

from app.distributed.checkpoints import PREFIX, Checkpoints
from app.distributed.processes import World, from_main, join, launch
from app.distributed.training_state import write_training_state
from app.optimization import build_optimizer, build_scheduler
from app.resume import MODEL, OPTIMIZER
from app.settings import Settings

ROUNDS, STEPS = 7, 50


def main(settings: Settings) -> None:
    with join(settings) as world, folder_of_all(world) as folder:
        benchmark(settings, world, folder)


def benchmark(settings: Settings, world: World, folder: Path) -> None:
    bench = set_up(settings, world)
    optimizer = build_optimizer(bench.ddp, settings, 1e-4)
    scheduler = build_scheduler(optimizer, settings, 2 * (ROUNDS + 1) * STEPS)
    checkpoints = Checkpoints(folder / "checkpoints", settings.save_total_limit, "stop", world)
    fill = partial(write_training_state, bench.ddp.module, optimizer, scheduler, world)

    def train_and_save(number: int, save: bool) -> None:
        train_steps(bench.ddp, bench.loader, optimizer, scheduler, world, STEPS)
        if save:
            checkpoints.save(f"{PREFIX}{STEPS * number}", fill, [MODEL, OPTIMIZER])

    ratios = []
    for number in range(ROUNDS + 1):  # the first one warms up
        bench.loader.sampler.set_epoch(number)  # type: ignore[attr-defined]
        order = (True, False) if number % 2 else (False, True)
        seconds = {save: timed(partial(train_and_save, number + 1, save), world) for save in order}
        if number:
            ratios.append(seconds[True] / seconds[False])
            world.say(f"{seconds[False]:8.2f} s without, {seconds[True]:8.2f} s with: {ratios[-1]:.3f}")
    world.say(
        f"a checkpoint every {STEPS} steps costs {statistics.median(ratios) - 1:+.1%} (median of {ROUNDS} rounds, from "
        f"{min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%}; {world.size} rank(s))"
    )


@contextmanager
def folder_of_all(world: World) -> Iterator[Path]:
    """A folder that is removed at the end, the same on every rank."""
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=".") as mine:
        yield Path(from_main(mine))
        torch.distributed.barrier()


if __name__ == "__main__":
    launch(main, __doc__)
