"""Benchmark: the cost of a checkpoint every 50 steps, on the same ranks, rows, model and batches.

    torchrun --nproc_per_node=2 -m app.bench.checkpoint_cost --csv reviews.csv

Each round trains 50 steps with and 50 steps without a checkpoint at their end, in alternating order, so that both are
affected if the machine slows down. The result is the median of the rounds' ratios.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from ..checkpoint.manager import PREFIX, CheckpointManager
from ..checkpoint.state import TrainingState
from ..common.files import staging_folder
from ..common.terminal import as_interrupt
from ..distributed.collectives import barrier, broadcast_object
from ..distributed.process_group import join
from ..distributed.world import World
from ..flags import BENCHMARKS, measure_tiny_bert
from ..program import launch
from ..runs.schema import CHECKPOINTS, checkpoint_files
from ..settings import Settings
from .harness import set_up, timed
from .rounds import in_rounds, ratios

ROUNDS, STEPS = 7, 50


def main(settings: Settings) -> None:
    with join(settings) as world, shared_folder(world) as folder:
        benchmark(settings, world, folder)


def benchmark(settings: Settings, world: World, folder: Path) -> None:
    """Time rounds with and without a checkpoint and print the ratio."""
    bench = set_up(settings, world)
    optimization = bench.optimization(2 * (ROUNDS + 1) * STEPS)
    checkpoints = CheckpointManager(folder / CHECKPOINTS, settings.save_total_limit, "stop", world=world)
    state = TrainingState(bench.model, optimization, bench.strategy, world)

    def train_and_save(round_number: int, save: bool) -> None:
        bench.train_steps(bench.loader, optimization, steps=STEPS)
        if save:
            checkpoints.save(f"{PREFIX}{STEPS * (round_number + 1)}", state.save, checkpoint_files(world.size)[:-1])

    def measure(save: bool, round_number: int) -> float:
        bench.loader.sampler.set_epoch(round_number)  # type: ignore[attr-defined]
        return timed(partial(train_and_save, round_number, save), world)

    seconds = in_rounds({save: partial(measure, save) for save in (False, True)}, ROUNDS, warm_up=True)
    for without, saving in zip(*seconds.values(), strict=True):
        world.print_main(f"{without:8.2f} s without, {saving:8.2f} s with: {saving / without:.3f}")
    cost = ratios(seconds[True], seconds[False])
    world.print_main(
        f"a checkpoint every {STEPS} steps costs {cost.middle - 1:+.1%} (median of {ROUNDS} rounds, from "
        f"{cost.low - 1:+.1%} to {cost.high - 1:+.1%}; {world.size} rank(s))"
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
    launch(main, __doc__, measure_tiny_bert, rejected=BENCHMARKS["bench.checkpoint_cost"])
