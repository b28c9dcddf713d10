"""Formulas for the bytes that a training step sends, collective by collective, from the shapes of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from app.sizes import MIB
from app.strategies.blocks import sharded_groups
from app.strategies.planner import BUCKET_CAP, assign_to_ranks, bytes_of

FIRST_BUCKET_CAP = 2**20  # DDP's default for the bucket whose gradients are computed first, in bytes
BUFFERS_CAP = 250 * 2**20  # DDP broadcasts buffers in pieces of at most this size
NORM_BYTES = 8  # a sum of squares in fp64


@dataclass(frozen=True)
class Collective:
    """A collective that all ranks take part in.

    Attributes:
        purpose: `gradients`, `parameters`, `buffers` or `norm`.
        what: which of them, such as `bucket 1`.
        operation: `all-reduce`, `all-gather`, `all-to-all` or `broadcast`.
        size: bytes: of the tensor that is reduced, broadcast or divided among the ranks, or of the gathered result.
        times: how often a training step calls it.
    """

    purpose: str
    what: str
    operation: str
    size: int
    times: int = 1

    def sent(self, ranks: int) -> float:
        """Return the bytes that a rank sends in a training step, averaged over the ranks.

        Ranks receive as much as they send. An all-gather, an all-to-all and a broadcast deliver each byte to those
        ranks that lack it, once. An all-reduce is a reduce-scatter and an all-gather, which is optimal (Patarasuk and
        Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"). For all but broadcasts these
        are also the factors of the "bus bandwidth" of NVIDIA's nccl-tests (doc/PERFORMANCE.md).
        """
        passes = 2 if self.operation == "all-reduce" else 1
        return passes * (ranks - 1) / ranks * self.size * self.times


def plan_traffic(
    model: PreTrainedModel,
    order: Sequence[torch.Tensor],
    strategy: str,
    ranks: int,
    logical_ranks_per_rank: int = 1,
    accumulation_steps: int = 1,
    bucket_cap_mb: int | None = None,
    find_unused_parameters: bool = False,
    on_gpus: bool = False,
) -> list[Collective]:
    """Return the collectives of a training step, except for the first one, in which DDP has a single bucket.

    Args:
        model: only its shapes are used: the parameters may be on the meta device.
        order: the parameters that get a gradient, in the order in which backward() computes them.
        bucket_cap_mb: `--ddp_bucket_cap_mb`.
        on_gpus: whether NCCL connects the ranks, and not gloo.
    """
    if strategy in ("zero2", "zero3"):
        return _sharded(model, order, strategy, ranks, logical_ranks_per_rank, accumulation_steps)
    collectives = _buffers(model)
    buckets = gradient_buckets(model, order, bucket_cap_mb, find_unused_parameters)
    for number, bucket in enumerate(buckets, start=1):
        collectives += _average(f"bucket {number}", bucket, ranks, on_gpus)
    if find_unused_parameters:
        n_parameters = sum(map(len, buckets))
        collectives.append(Collective("gradients", "which parameters have one", "all-reduce", 4 * n_parameters))
    if strategy == "zero1":
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for rank, share in enumerate(assign_to_ranks(trainable, ranks)):
            # ZeroRedundancyOptimizer broadcasts one fp32 number for a rank without parameters.
            size = sum(map(bytes_of, share)) or 4
            collectives.append(Collective("parameters", f"those of rank {rank}", "broadcast", size))
    return collectives


def gradient_buckets(
    model: PreTrainedModel, order: Sequence[torch.Tensor], bucket_cap_mb: int | None, find_unused_parameters: bool
) -> list[list[torch.Tensor]]:
    """Return the parameters of DDP's buckets, in the order in which they are averaged.

    DDP fills a bucket until it reaches the limit, in the order in which the first backward pass computed the gradients.
    If it searches for unused parameters, it keeps its first buckets, which are in the reverse order of the model.
    (`Reducer::rebuild_buckets` and `compute_bucket_assignment_by_size` in torch/csrc/distributed/c10d/reducer.cpp.)
    """
    cap = BUCKET_CAP if bucket_cap_mb is None else bucket_cap_mb * MIB
    first_cap = FIRST_BUCKET_CAP if bucket_cap_mb is None else cap
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ordered: list[torch.Tensor] = list(parameters if find_unused_parameters else order)
    buckets, _ = dist._compute_bucket_assignment_by_size(  # type: ignore[attr-defined]
        ordered, [first_cap, cap], [False] * len(ordered), list(range(len(ordered)))
    )
    in_order = [[ordered[i] for i in bucket] for bucket in buckets]
    return in_order[::-1] if find_unused_parameters else in_order


def _average(what: str, bucket: Sequence[torch.Tensor], ranks: int, on_gpus: bool) -> list[Collective]:
    """Return the collectives that average a bucket (`FixedOrderAllReduce`, or DDP's own all-reduce)."""
    size, element = sum(map(bytes_of, bucket)), bucket[0].element_size()
    if ranks <= 2:
        return [Collective("gradients", what, "all-reduce", size)]
    rest = size // element % ranks * element
    divided = size - rest
    collectives = []
    if divided:
        collectives.append(Collective("gradients", what, "all-to-all", divided))
    if rest:
        collectives.append(Collective("gradients", f"{what}, rest", "all-gather", ranks * rest))
    if divided and on_gpus:
        collectives.append(Collective("gradients", what, "all-gather", divided))
    elif divided:
        collectives.append(Collective("gradients", what, "broadcast", divided // ranks, times=ranks))
    return collectives


def _buffers(model: PreTrainedModel) -> list[Collective]:
    """Return DDP's broadcasts of rank 0's buffers, before the first forward pass of a training step."""
    buffers = list(model.buffers())
    if not buffers:
        return []
    pieces, _ = dist._compute_bucket_assignment_by_size(buffers, [BUFFERS_CAP])  # type: ignore[attr-defined]
    sizes = [sum(bytes_of(buffers[i]) for i in piece) for piece in pieces]
    return [Collective("buffers", str(number), "broadcast", size) for number, size in enumerate(sizes, start=1)]


def _sharded(
    model: PreTrainedModel,
    order: Sequence[torch.Tensor],
    strategy: str,
    ranks: int,
    logical_ranks_per_rank: int,
    accumulation_steps: int,
) -> list[Collective]:
    """Return FSDP2's collectives, with the rows that it adds to make shards equal, and that of the gradient norm.

    A group of parameters is gathered once in each forward pass, under ZeRO-3 also in each backward pass. Its gradients
    are exchanged once per logical rank.
    """
    gathers = logical_ranks_per_rank * accumulation_steps * (2 if strategy == "zero3" else 1)
    with_gradient = set(order)
    gathered, exchanged = [], []
    *blocks, rest = sharded_groups(model)
    named = [(f"block {number}", block) for number, block in enumerate(reversed(blocks), start=1)]
    for what, group in [*named, ("the rest", rest)] if ranks > 1 else []:
        size = sum(_padded(parameter, ranks) for parameter in group)
        gradients = sum(_padded(parameter, ranks) for parameter in group if parameter in with_gradient)
        if size:
            gathered.append(Collective("parameters", what, "all-gather", size, gathers))
        if gradients:
            exchanged.append(Collective("gradients", what, "all-to-all", gradients, logical_ranks_per_rank))
    return [*gathered, *exchanged, Collective("norm", "of the gradients", "all-reduce", NORM_BYTES)]


def _padded(parameter: torch.Tensor, ranks: int) -> int:
    rows = parameter.shape[0]
    return bytes_of(parameter) // rows * (-(-rows // ranks) * ranks)
