"""Benchmark: the fixed order of additions compared with DDP's plain all-reduce, in complete training steps.

    torchrun --standalone --nproc_per_node=2 -m app.bench.reduction --csv reviews.csv
    torchrun --standalone --nproc_per_node=4 -m app.bench.reduction --csv reviews.csv --threads 1

Trains the model `tiny` and a BERT of 4 layers x 312 with plain all-reduce, with as many logical ranks as processes,
and with twice as many; on several nodes also without summing inside the nodes first. Rounds of all alternate, so that
all are affected if the machine slows down. The result is the median of the rounds' ratios. Training flags apply to all
of them, except that the strategy is `ddp` and gradients are not compressed. `app.bench.communication` has the same
comparison as one of its sections.
"""

from __future__ import annotations

import statistics

from ..distributed.process_group import join
from ..program import launch
from ..settings import Settings
from ..training.build import build_data
from ..training.console import quiet_libraries
from .communication.step_variants import Comparison, compare, models, plain_ddp, reduction_variants

SECONDS = 12.0  # for each variant


def main(settings: Settings) -> None:
    with join(settings) as world:
        quiet_libraries(world)
        settings = plain_ddp(settings)
        data = build_data(settings, world)
        for model in models(settings):
            comparison = compare(model, reduction_variants(settings, world.topology), data, SECONDS, world)
            world.print_main(describe(comparison, world.size))


def describe(comparison: Comparison, ranks: int) -> str:
    """Return one line per variant."""
    lines = []
    for name, seconds in comparison.seconds.items():
        changes = [ratio - 1 for ratio in comparison.ratios(name)]
        lines.append(
            f"{comparison.model}, {ranks} rank(s), {name:>16}: median {1000 * comparison.median(name):7.1f} ms per "
            f"step, {statistics.median(changes):+.1%} (from {changes[0]:+.1%} to {changes[-1]:+.1%} over "
            f"{len(seconds)} rounds)"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    launch(main, __doc__)
