"""Formulas for the bytes that a training step sends, collective by collective, from the shapes of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _should_compress
from transformers import PreTrainedModel

from ..common.formats import MIB
from ..distributed.collectives import saved_buffers
from ..distributed.world import Topology
from ..settings import SHARDED
from ..strategies.base import sharded_groups
from ..strategies.compression import MATRIX_RANK, MIN_COMPRESSION_RATE
from .memory import (
    BUCKET_CAP,
    assign_to_ranks,
    gathered_bytes,
    reduced_bytes,
    sent_bytes,
    shard_bytes,
    total_bytes,
)
from .step import Plan

FIRST_BUCKET_CAP = MIB  # DDP's default for the bucket whose gradients are computed first
BUFFERS_CAP = 250 * MIB  # DDP broadcasts buffers in pieces of at most this size
NORM_BYTES = 8  # a sum of squares in fp64
# The ranks that take part in a collective.
ALL, INSIDE, BETWEEN = "all ranks", "the ranks of a node", "equal local ranks"


@dataclass(frozen=True)
class Collective:
    """A collective that every rank calls, with all other ranks or with some of them."""

    purpose: str  # `gradients`, `parameters`, `buffers` or `norm`
    what: str  # the part of them, such as `bucket 1`
    operation: str  # `all-reduce`, `all-gather`, `all-to-all` or `broadcast`
    size: int  # bytes: of the tensor that is reduced, broadcast or divided among the ranks, or of the gathered result
    times: int = 1
    among: str = ALL  # or `INSIDE` or `BETWEEN`, the two levels in which the ranks of several nodes exchange gradients

    def sent(self, topology: Topology) -> float:
        """Return the bytes that a rank sends in a training step, averaged over the ranks.

        Ranks receive as much as they send. An all-gather, an all-to-all and a broadcast deliver each byte to those
        ranks that lack it, once. An all-reduce is a reduce-scatter and an all-gather, which is optimal (Patarasuk and
        Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"). For all but broadcasts these
        are also the factors of the "bus bandwidth" of NVIDIA's nccl-tests (doc/PERFORMANCE.md).
        """
        passes = 2 if self.operation == "all-reduce" else 1
        ranks = ranks_of(self.among, topology)
        return passes * (ranks - 1) / ranks * self.size * self.times

    def leaving(self, topology: Topology) -> float:
        """Return the bytes that leave a node in a training step, averaged over the nodes.

        Among all ranks, an all-gather and an all-reduce are assumed to be rings, which enter and leave each node once,
        and a broadcast to enter each node once. An all-to-all sends from each rank to each rank of the other nodes.
        """
        if topology.nodes == 1 or self.among == INSIDE:
            return 0.0
        if self.among == BETWEEN:
            return topology.inside * self.sent(topology)
        if self.operation == "all-to-all":
            return (topology.ranks - topology.inside) / topology.nodes * self.size * self.times
        if self.operation == "broadcast":
            return (topology.nodes - 1) / topology.nodes * self.size * self.times
        return self.sent(topology)


def ranks_of(among: str, topology: Topology) -> int:
    return {ALL: topology.ranks, INSIDE: topology.inside, BETWEEN: topology.nodes}[among]


def plan_traffic(plan: Plan) -> list[Collective]:
    """Return the collectives of a training step, except for the first one, in which DDP has a single bucket.

    PowerSGD is planned for the steps in which it compresses.
    """
    if plan.strategy in SHARDED:
        return _sharded(plan)
    collectives = _buffers(plan.model)
    buckets = gradient_buckets(plan)
    for number, bucket in enumerate(buckets, start=1):
        if plan.settings.ddp_comm_hook == "power_sgd":
            collectives += _low_rank(f"bucket {number}", bucket)
            continue
        collectives += _average(plan, f"bucket {number}", bucket)
    if plan.find_unused_parameters:
        n_parameters = sum(map(len, buckets))
        collectives.append(Collective("gradients", "which parameters have one", "all-reduce", 4 * n_parameters))
    if plan.strategy == "zero1":
        for rank, share in enumerate(assign_to_ranks(plan.trainable, plan.topology.ranks)):
            # ZeroRedundancyOptimizer broadcasts one fp32 number for a rank without parameters.
            size = total_bytes(share) or 4
            collectives.append(Collective("parameters", f"those of rank {rank}", "broadcast", size))
    return collectives


def gradient_buckets(plan: Plan) -> list[list[torch.Tensor]]:
    """Return the parameters of DDP's buckets, in the order in which they are averaged.

    DDP fills a bucket until it reaches the limit, in the order in which the first backward pass computed the gradients.
    If it searches for unused parameters, it keeps its first buckets, which are in the reverse order of the model.
    (`Reducer::rebuild_buckets` and `compute_bucket_assignment_by_size` in torch/csrc/distributed/c10d/reducer.cpp.)
    """
    caps = [plan.bucket_cap or FIRST_BUCKET_CAP, plan.bucket_cap or BUCKET_CAP]
    ordered = plan.trainable if plan.find_unused_parameters else plan.order
    indices, _ = dist._compute_bucket_assignment_by_size(  # type: ignore[attr-defined]
        ordered, caps, [False] * len(ordered), list(range(len(ordered)))
    )
    buckets = [[ordered[i] for i in bucket] for bucket in indices]
    return buckets[::-1] if plan.find_unused_parameters else buckets


def _average(plan: Plan, what: str, bucket: Sequence[torch.Tensor]) -> list[Collective]:
    """Return the collectives that average the gradients of a bucket (`FixedOrderAllReduce`, or DDP's own)."""
    elements, element = sum(parameter.numel() for parameter in bucket), sent_bytes(plan, bucket[0])
    topology, ranks = plan.topology, plan.topology.ranks
    if ranks <= 2:
        return [Collective("gradients", what, "all-reduce", elements * element)]
    rest = elements % ranks * element
    divided = elements * element - rest
    sums = _summed(what, divided, topology)
    rests = [Collective("gradients", f"{what}, rest", "all-gather", ranks * rest)] if rest else []
    averages = []
    for level in reversed(sums):
        if plan.on_gpus:
            averages.append(replace(level, operation="all-gather"))
        else:
            n = ranks_of(level.among, topology)
            averages.append(replace(level, operation="broadcast", size=level.size // n, times=n))
    return sums + rests + averages


def _summed(what: str, size: int, topology: Topology, *, times: int = 1) -> list[Collective]:
    """Return the all-to-alls of gradients, in one level or in two."""
    if not size:
        return []
    whole = Collective("gradients", what, "all-to-all", size, times)
    if not topology.two_levels:
        return [whole]
    return [replace(whole, among=INSIDE), replace(whole, among=BETWEEN, size=size // topology.inside)]


def _low_rank(what: str, parameters: Sequence[torch.Tensor]) -> list[Collective]:
    """Return PowerSGD's collectives: gradients that it does not compress, and the factors P and Q of the others."""
    complete = rows = columns = 0
    for parameter in parameters:
        n = parameter.shape[0] if parameter.ndim else 1
        m = parameter.numel() // n
        rank = min(n, m, MATRIX_RANK)
        if _should_compress(n, m, rank, MIN_COMPRESSION_RATE)[0]:
            rows, columns = rows + n * rank, columns + m * rank
        else:
            complete += n * m
    element = parameters[0].element_size()
    sizes = {"not compressed": complete, "factors P": rows, "factors Q": columns}
    return [Collective("gradients", f"{what}, {name}", "all-reduce", n * element) for name, n in sizes.items()]


def _buffers(model: PreTrainedModel) -> list[Collective]:
    """Return DDP's broadcasts of rank 0's buffers, before the first forward pass of a training step."""
    buffers = list(saved_buffers(model).values())
    if not buffers:
        return []
    pieces, _ = dist._compute_bucket_assignment_by_size(buffers, [BUFFERS_CAP])  # type: ignore[attr-defined]
    sizes = [total_bytes(buffers[i] for i in piece) for piece in pieces]
    return [Collective("buffers", str(number), "broadcast", size) for number, size in enumerate(sizes, start=1)]


def _sharded(plan: Plan) -> list[Collective]:
    """Return FSDP2's collectives, with the rows that it adds to make shards equal, and the one for the gradient norm.

    A group of parameters is gathered once in each forward pass, under ZeRO-3 each block also in each backward pass. Its
    gradients are exchanged once per logical rank.
    """
    ranks, with_gradient, batches = plan.topology.ranks, set(plan.order), plan.batches
    gathered: list[Collective] = []
    exchanged: list[Collective] = []
    *blocks, rest = sharded_groups(plan.model)
    named = [(f"block {number}", block) for number, block in enumerate(reversed(blocks), start=1)]
    for what, group in [*named, ("the rest", rest)] if ranks > 1 else []:
        padded = {parameter: ranks * shard_bytes(parameter, 0, ranks) for parameter in group}
        size = sum(padded.values())
        gradients = sum(padded[parameter] for parameter in group if parameter in with_gradient)
        if size:
            gradients = reduced_bytes(plan, gradients, group[0].element_size())
            twice = plan.strategy == "zero3" and group is not rest
            times = batches.micro_batches_per_step * (1 + twice)
            gathered.append(Collective("parameters", what, "all-gather", gathered_bytes(plan, size), times))
        exchanged += _summed(what, gradients, plan.topology, times=batches.logical_ranks_per_rank)
    return [*gathered, *exchanged, Collective("norm", "of the gradients", "all-reduce", NORM_BYTES)]
