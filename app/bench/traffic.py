"""Benchmark: the bytes that a training step sends, counted from its collectives, next to what app.plan predicts.

    torchrun --nproc_per_node=2 -m app.bench.traffic
    torchrun --nproc_per_node=4 -m app.bench.traffic --model bert-base-chinese --logical_ranks 8

Counts the third step under each strategy: in the first one, DDP exchanges all gradients at once. Ends with exit status
1 if a predicted number differs from the counted one.
"""

from __future__ import annotations

if __name__ == "__main__":
    from ..program import check_command_line
    from .flags import measure_tiny_bert

    check_command_line(__doc__, measure_tiny_bert)

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..common.errors import RunError
from ..common.formats import markdown_table
from ..distributed.collectives import all_gather_object
from ..distributed.process_group import join
from ..distributed.world import Topology, World
from ..plan.memory import bytes_of
from ..plan.traffic import ALL, BETWEEN, INSIDE, Collective
from ..program import launch
from ..settings import Settings
from ..training.build import ReviewData, build_data
from ..training.console import quiet_libraries
from .flags import measure_tiny_bert
from .steps import Bench, build_planned, with_each_strategy


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
    bench, plan = build_planned(settings.model, settings, data, world=world)
    predicted = plan.traffic(settings.strategy)
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


Counts = Counter[tuple[str, int, str]]  # how often a step calls a collective: (operation, bytes, among which ranks)

# Each collective, and which of its arguments is as large as `Collective.size`.
ARGUMENTS = {
    "allreduce_": ("all-reduce", 0),
    "broadcast_": ("broadcast", 0),
    "allgather_": ("all-gather", 0),
    "_allgather_base_": ("all-gather", 0),
    "alltoall_base_": ("all-to-all", 1),
    "reduce_scatter_": ("reduce-scatter", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
}

STEPS = 3  # the last one is counted


def count_third_step(bench: Bench) -> Counts:
    """Return the collectives of a training step. Collective."""
    optimization = bench.optimization(STEPS)
    batches = cycle(bench.loader)  # the data may have fewer steps
    bench.train_steps(batches, optimization, steps=STEPS - 1)
    with CountCollectives(bench.world.topology) as mode:
        bench.train_steps(batches, optimization, steps=1)
    counts: Counts = mode.counts
    return counts


def sent_bytes(counts: Counts, topology: Topology) -> float:
    """Return the bytes that a rank sends in counted collectives, averaged over the ranks."""
    collectives = (Collective("", "", kind, size, times, among) for (kind, size, among), times in counts.items())
    return sum(collective.sent(topology) for collective in collectives)


class CountCollectives(TorchDispatchMode):
    """Count the collectives in a block, also those that DDP starts in C++: PyTorch dispatches them like operators.

    This is how `torch.distributed.tensor.debug.CommDebugMode` finds them; it does not record their sizes.
    """

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self.topology = topology
        self.counts: Counts = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: PLR0917 (the caller's signature)
        """Run an operation, and count it if it is a collective."""
        if operation.namespace == "c10d":
            name = operation.overloadpacket.__name__
            kind, index = ARGUMENTS.get(name, (name, 0))
            tensors = [leaf for leaf in tree_leaves(args[index]) if isinstance(leaf, torch.Tensor)]
            (group,) = (
                arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())
            )
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
            self.counts[kind, sum(map(bytes_of, tensors)), among_which(ranks, self.topology)] += 1
        return operation(*args, **(kwargs or {}))


def among_which(ranks: Sequence[int], topology: Topology) -> str:
    """Return which ranks take part in a collective: `ALL`, `INSIDE` or `BETWEEN`."""
    if len(ranks) == topology.ranks:
        return ALL
    return INSIDE if len({rank // topology.inside for rank in ranks}) == 1 else BETWEEN


if __name__ == "__main__":
    launch(main, __doc__, measure_tiny_bert)
