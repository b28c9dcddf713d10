"""Benchmark: the bytes that a training step sends, counted from its collectives, next to what app.plan predicts.

    torchrun --nproc_per_node=2 -m app.bench.traffic
    torchrun --nproc_per_node=4 -m app.bench.traffic --model bert-base-chinese --logical_ranks 8

Counts the third step under each strategy: in the first one, DDP exchanges all gradients at once. A row of a table is a
kind of collective: its size, the ranks among which it is, what it exchanges, how often. The step trains on the bundled
sample, unless --csv or --dataset_name is given, because the tokens that occur decide the size of the embeddings. Ends
with exit status 1 if a counted number differs from the predicted one.
"""

from __future__ import annotations

from ..program import Program
from ..settings import OF_A_STEP, Settings
from .models import measure_tiny_bert

PROGRAM = Program(__doc__, measure_tiny_bert, only=OF_A_STEP)
if __name__ == "__main__":
    PROGRAM.check_command_line()  # before torch is imported, which takes seconds

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..distributed.world import Topology
from ..plan.memory import total_bytes
from ..plan.step import Plan
from ..plan.traffic import ALL, BETWEEN, INSIDE, Collective, plan_traffic
from .planned import MEASURED, PREDICTED, compare_with_plan
from .steps import Bench

Counts = Counter[tuple[str, int, str]]  # how often a step calls a collective: (operation, bytes, among which ranks)
STEPS = 3  # the last one is counted
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


def main(settings: Settings) -> None:
    # PowerSGD begins to compress after a share of all steps.
    compare_with_plan(replace(settings, max_steps=STEPS), measure)


def measure(bench: Bench, plan: Plan) -> pd.DataFrame:
    """Train three steps, and return how often the last one calls each kind of collective. Collective."""
    predicted, topology = plan_traffic(plan), bench.world.topology
    expected, counted = as_counts(predicted), count_third_step(bench)
    sent = f"A rank sends {sum(collective.sent(topology) for collective in predicted):,.0f} bytes per step"
    if topology.nodes > 1:
        sent += f", and {sum(collective.leaving(topology) for collective in predicted):,.0f} bytes leave a node"
    bench.world.print_main(f"{sent}.\n")
    rows = []
    for operation, size, among in expected | counted:
        same = [c for c in predicted if (c.operation, c.size, c.among) == (operation, size, among)]
        what = "; ".join(f"{c.purpose}: {c.what}" for c in same) or "not predicted"
        counts = (of_kind[operation, size, among] for of_kind in (expected, counted))
        rows.append([f"{operation} of {size:,} bytes", among, what, *counts])
    return pd.DataFrame(rows, columns=["collective", "among", "what", PREDICTED, MEASURED]).set_index("collective")


def as_counts(collectives: Iterable[Collective]) -> Counts:
    """Return how often a step calls each collective."""
    counts = Counts()
    for collective in collectives:
        counts[collective.operation, collective.size, collective.among] += collective.times
    return counts


def count_third_step(bench: Bench) -> Counts:
    """Return the collectives of a training step. Collective."""
    optimization = bench.optimization(STEPS)
    batches = cycle(bench.loader)  # the data may have fewer steps
    bench.train_steps(batches, optimization, steps=STEPS - 1)
    with CountCollectives(bench.world.topology) as mode:
        bench.train_steps(batches, optimization, steps=1)
    counts: Counts = mode.counts
    return counts


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
            self.counts[kind, total_bytes(tensors), among_which(ranks, self.topology)] += 1
        return operation(*args, **(kwargs or {}))


def among_which(ranks: Sequence[int], topology: Topology) -> str:
    """Return which ranks take part in a collective: `ALL`, `INSIDE` or `BETWEEN`."""
    if len(ranks) == topology.ranks:
        return ALL
    return INSIDE if len({rank // topology.inside for rank in ranks}) == 1 else BETWEEN


if __name__ == "__main__":
    PROGRAM.launch(main)
