"""Benchmark: the bytes that a training step sends, counted from its collectives, next to what app.plan predicts.

    torchrun --nproc_per_node=2 -m app.bench.traffic
    torchrun --nproc_per_node=4 -m app.bench.traffic --model bert-base-chinese --logical_ranks 8

Counts the third step under each strategy: in the first one, DDP exchanges all gradients at once. Ends with exit status
1 if a predicted number differs from the counted one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..common.errors import RunError
from ..common.formats import markdown_table
from ..distributed.collectives import all_gather_object, raise_on_all_ranks
from ..distributed.process_group import join
from ..distributed.world import World
from ..plan.step import plan_step
from ..plan.traffic import Collective
from ..program import launch
from ..settings import Settings
from ..training.build import ReviewData, build_data, build_model
from ..training.console import quiet_libraries
from .count_collectives import STEPS, Counts, count_third_step
from .harness import distribute, with_each_strategy


def main(settings: Settings) -> None:
    with join(settings) as world:
        quiet_libraries(world)
        data = build_data(settings, world)
        for with_strategy in with_each_strategy(settings):
            compare(with_strategy, data, world)


def compare(settings: Settings, data: ReviewData, world: World) -> None:
    """Train three steps, and print a line for each kind of collective. Collective.

    Raises:
        RunError: a rank has called other collectives than predicted.
    """
    settings = replace(settings, max_steps=STEPS)  # PowerSGD begins to compress after a share of all steps
    model = build_model(settings, data, world).model
    config = copy.deepcopy(model.config)
    bench = distribute(settings, data, model, world=world)
    with raise_on_all_ranks(world):
        predicted = plan_step(settings, config, bench.data.plan, device=world.device, topology=world.topology).traffic(
            settings.strategy
        )
    counted = count_third_step(bench)
    rows = rows_of(predicted, counted)
    header = ["operation", "among", "what", "bytes", "predicted", "counted"]
    sent = f"a rank sends {sum(collective.sent(world.topology) for collective in predicted):,.0f} bytes per step"
    if world.topology.nodes > 1:
        sent += f", and {sum(collective.leaving(world.topology) for collective in predicted):,.0f} bytes leave a node"
    world.print_main(f"## {settings.strategy}: {sent}\n")
    world.print_main(markdown_table(header, rows, text_columns=3))
    expected = as_counts(predicted)
    wrong = [rank for rank, count in enumerate(all_gather_object(counted, world)) if count != expected]
    if wrong:
        raise RunError(f"{settings.strategy}: rank(s) {wrong} called other collectives than predicted")


def rows_of(predicted: Sequence[Collective], counted: Counts) -> list[list[str]]:
    """Return the cells of the table: for each collective of one size, how often it was predicted and counted."""
    expected = as_counts(predicted)
    rows = []
    for key in expected | counted:
        same = [c for c in predicted if (c.operation, c.size, c.among) == key]
        what = "; ".join(f"{c.purpose}: {c.what}" for c in same) or "not predicted"
        operation, size, among = key
        rows.append([operation, among, what, f"{size:,}", str(expected[key]), str(counted[key])])
    return rows


def as_counts(collectives: Iterable[Collective]) -> Counts:
    """Return how often a step calls each collective."""
    counts = Counts()
    for collective in collectives:
        counts[collective.operation, collective.size, collective.among] += collective.times
    return counts


if __name__ == "__main__":
    launch(main, __doc__)
