"""Benchmark: the cost of a checkpoint every 50 steps, on the same ranks, rows, model and batches.

    torchrun --nproc_per_node=2 -m app.bench.checkpoint_cost --csv reviews.csv

Each round trains 50 steps with and 50 steps without a checkpoint at their end, in alternating order, so that both are
affected if the machine slows down. The result is the median of the rounds' ratios.
"""

from __future__ import annotations

import signal
import statistics
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from ..checkpoint.manager import PREFIX, CheckpointManager
from ..checkpoint.state import TrainingState
from ..common.files import staging_folder
from ..common.interrupts import as_interrupt
from ..distributed.collectives import barrier, broadcast_object
from ..distributed.process_group import join
from ..distributed.world import World
from ..program import launch
from ..runs.schema import CHECKPOINTS, checkpoint_files
from ..settings import Settings
from ..training.optim import build_optimizer, build_scheduler
from .harness import set_up, timed

ROUNDS, STEPS = 7, 50


def main(settings: Settings) -> None:
    with join(settings) as world, shared_folder(world) as folder:
        benchmark(settings, world, folder)


def benchmark(settings: Settings, world: World, folder: Path) -> None:
    """Time rounds with and without a checkpoint and print the ratio."""
    bench = set_up(settings, world)
    optimizer = build_optimizer(bench.wrapped, settings, 1e-4, bench.strategy)
    scheduler = build_scheduler(optimizer, settings, 2 * (ROUNDS + 1) * STEPS)
    checkpoints = CheckpointManager(folder / CHECKPOINTS, settings.save_total_limit, "stop", world)
    state = TrainingState(bench.model, bench.optimization(optimizer, scheduler), bench.strategy, world)

    def train_and_save(number: int, save: bool) -> None:
        bench.train_steps(bench.loader, optimizer, scheduler, STEPS)
        if save:
            checkpoints.save(f"{PREFIX}{STEPS * number}", state.save, checkpoint_files(world.size)[:-1])

    ratios = []
    for number in range(ROUNDS + 1):  # the first one warms up
        bench.loader.sampler.set_epoch(number)  # type: ignore[attr-defined]
        order = (True, False) if number % 2 else (False, True)
        seconds = {save: timed(partial(train_and_save, number + 1, save), world) for save in order}
        if number:
            ratios.append(seconds[True] / seconds[False])
            world.print_main(f"{seconds[False]:8.2f} s without, {seconds[True]:8.2f} s with: {ratios[-1]:.3f}")
    world.print_main(
        f"a checkpoint every {STEPS} steps costs {statistics.median(ratios) - 1:+.1%} (median of {ROUNDS} rounds, from "
        f"{min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%}; {world.size} rank(s))"
    )


@contextmanager
def shared_folder(world: World) -> Iterator[Path]:
    """Create a temporary folder that all ranks share, and remove it at the end of the block. Collective."""
    # torchrun ends its ranks by SIGTERM, which would leave the folder. After a SIGKILL, the next start removes it.
    with (
        as_interrupt(signal.SIGTERM, signal.SIGHUP),
        staging_folder(Path("checkpoint_cost")) if world.is_main_process else nullcontext() as folder,
    ):
        yield Path(broadcast_object(str(folder), world))
        barrier(world)


if __name__ == "__main__":
    launch(main, __doc__)
