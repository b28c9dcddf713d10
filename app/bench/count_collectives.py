"""Count the collectives that a training step calls, and the bytes that a rank sends in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..distributed.topology import Topology
from ..plan.memory import bytes_of
from ..plan.traffic import ALL, BETWEEN, INSIDE, Collective
from ..training.optim import build_optimizer, build_scheduler
from .harness import Bench

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
    optimizer = build_optimizer(bench.wrapped, bench.settings, 1e-4, strategy=bench.strategy)
    scheduler = build_scheduler(optimizer, bench.settings, STEPS)
    per_step = bench.data.plan.micro_batches_per_step
    batches = cycle(bench.loader)  # the data may have fewer steps
    bench.train_steps(islice(batches, (STEPS - 1) * per_step), optimizer, scheduler, steps=STEPS - 1)
    with CountCollectives(bench.world.topology) as mode:
        bench.train_steps(islice(batches, per_step), optimizer, scheduler, steps=1)
    counts: Counts = mode.counts
    return counts


def sent_bytes(counts: Counts, topology: Topology) -> float:
    """Return the bytes that a rank sends in counted collectives, averaged over the ranks."""
    collectives = (Collective("", "", kind, size, times, among) for (kind, size, among), times in counts.items())
    return sum(collective.sent(topology) for collective in collectives)


class CountCollectives(TorchDispatchMode):
    """Count the collectives in a block, also those that DDP starts in C++: PyTorch dispatches them like operators.

    This is how `torch.distributed.tensor.debug.CommDebugMode` finds them; it does not record their sizes.

    Attributes:
        counts: how often each collective was called.
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
