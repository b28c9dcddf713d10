"""Formulas for the memory that a training step needs on each rank, from the shapes of the parameters alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..common.formats import MIB
from ..settings import SHARDED, WRAPPED_IN_DDP
from ..strategies.base import divide_rows, sharded_groups
from ..strategies.compression import HOOK_DTYPES
from ..strategies.optimization import MOMENTS
from ..strategies.reduction import buckets_in_flight
from .step import Plan

N_MOMENTS = len(MOMENTS)  # AdamW's moving averages of the gradient and of its square
BUCKET_CAP = 25 * MIB  # DDP's default


@dataclass(frozen=True)
class RankMemory:
    """The memory that one rank needs in a training step besides activations, in bytes."""

    parameters: int  # all of them, or the rank's shard
    gradients: int  # all of them, or the rank's shard
    optimizer: int  # AdamW's moments of the parameters that the rank updates
    gathered: int = 0  # complete parameters of which the rank holds a shard only
    exchange: int = 0  # complete gradients of a sharded block, gradients of other ranks, and compressed gradients
    accumulated: int = 0  # complete gradients of the logical rank in progress, beside those that are exchanged
    partial_sums: int = 0  # gradients of logical ranks that are done, complete or this rank's shard
    cpu_offload: bool = False  # keeps shards in main memory

    @property
    def state(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def in_main_memory(self) -> int:
        """The bytes of shards, if they are offloaded."""
        return self.state + self.partial_sums if self.cpu_offload else 0

    @property
    def on_device(self) -> int:
        everything = self.state + self.gathered + self.exchange + self.accumulated + self.partial_sums
        return everything - self.in_main_memory


def plan_memory(plan: Plan) -> list[RankMemory]:
    """Return the memory of each rank, from the shapes of the model, which may be on the meta device.

    `ddp`: each rank holds everything. `zero1` (Rajbhandari et al. 2020, section 5.1): everything but the moments of the
    parameters that other ranks update; `ZeroRedundancyOptimizer` assigns complete parameters. `zero2` and `zero3`
    (sections 5.2 and 5.3): a shard of everything; FSDP2 divides the rows of each parameter, and pads shards and their
    gradients to the size of rank 0's. AdamW's step counters, 4 bytes per parameter tensor, are left out.
    """
    settings, topology, batches, ranks = plan.settings, plan.topology, plan.batches, plan.topology.ranks
    trainable = plan.trainable
    frozen = [parameter for parameter in plan.model.parameters() if not parameter.requires_grad]
    complete = total_bytes(trainable)
    n_sums = (batches.logical_ranks_per_rank - 1).bit_length()
    in_progress = complete if batches.accumulation_steps > 1 else 0
    if plan.strategy in WRAPPED_IN_DDP:
        sent = complete // trainable[0].element_size() * sent_bytes(plan, trainable[0])
        buckets = buckets_in_flight(2 if topology.two_levels else 1, plan.on_gpus) if ranks > 2 else 0
        received = min(complete, buckets * max(plan.bucket_cap or BUCKET_CAP, *(p.nbytes for p in trainable)))
        exchange = received * sent // complete
        if settings.ddp_comm_hook in HOOK_DTYPES:  # the rounded copy of every bucket
            exchange += sent
        elif settings.ddp_comm_hook == "power_sgd":  # the errors, and two copies of a bucket, which may be the only one
            exchange = 3 * complete
        updated = [complete] * ranks
        if plan.strategy == "zero1":
            updated = list(map(total_bytes, assign_to_ranks(trainable, ranks)))
        # DDP copies gradients into its buckets in the backward pass of the last micro-batch.
        sums = n_sums * sent
        replicated = complete + total_bytes(frozen)
        return [
            RankMemory(replicated, complete, N_MOMENTS * share, 0, exchange, in_progress, sums) for share in updated
        ]
    *blocks, rest = map(total_bytes, sharded_groups(plan.model))
    # ZeRO-3 gathers the next block while it uses this one.
    gathered = complete + total_bytes(frozen) if plan.strategy == "zero2" else rest + sum(sorted(blocks)[-2:])
    # The gradients of a block, FSDP2's copy of them, their rounded copy if there is one, and what is received.
    block, element = max([rest, *blocks]), trainable[0].element_size()
    received = reduced_bytes(plan, block, element)
    exchange = gathered_bytes(plan, block) + block + received * (2 if received < block else 1)
    gathered, offload = gathered_bytes(plan, gathered), plan.cpu_offload
    padded, padded_frozen = (sum(shard_bytes(p, 0, ranks) for p in group) for group in (trainable, frozen))
    memory = []
    for rank in range(ranks):
        shard = sum(shard_bytes(p, rank, ranks) for p in trainable)
        sums, held, moments = n_sums * reduced_bytes(plan, shard, element), padded + padded_frozen, N_MOMENTS * shard
        memory.append(RankMemory(held, padded, moments, gathered, exchange, in_progress, sums, offload))
    return memory


def gathered_after_forward(plan: Plan) -> int:
    """Return the bytes of complete parameters that remain for the backward pass, besides this rank's shards."""
    if plan.strategy not in SHARDED:
        return 0
    remaining = plan.model.parameters() if plan.strategy == "zero2" else sharded_groups(plan.model)[-1]
    return gathered_bytes(plan, total_bytes(remaining))


def sent_bytes(plan: Plan, gradient: torch.Tensor) -> int:
    """Return the bytes of an element of a gradient that DDP exchanges."""
    return HOOK_DTYPES.get(plan.settings.ddp_comm_hook, gradient.dtype).itemsize


def gathered_bytes(plan: Plan, size: int) -> int:
    """Return the bytes of gathered parameters of which the shards have a size."""
    return size // 2 if plan.settings.param_dtype == "bf16" else size  # the shards are in fp32


def reduced_bytes(plan: Plan, size: int, element: int) -> int:
    """Return the bytes that FSDP2 exchanges of gradients of a size, whose elements have some bytes each."""
    return size // element * 2 if plan.settings.reduce_dtype == "bf16" else size


def assign_to_ranks(parameters: Sequence[torch.Tensor], ranks: int) -> list[list[torch.Tensor]]:
    """Return the parameters that each rank updates under ZeRO-1, as `ZeroRedundancyOptimizer` assigns them.

    Each one of a parameter group, from the largest to the smallest, goes to the rank that has the fewest elements.
    """
    shares: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    elements = [0] * ranks
    # The groups of `training.step.build_optimizer`.
    for group in ([p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]):
        for parameter in sorted(group, key=torch.Tensor.numel, reverse=True):
            rank = elements.index(min(elements))
            shares[rank].append(parameter)
            elements[rank] += parameter.numel()
    return shares


def total_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def shard_bytes(parameter: torch.Tensor, rank: int, ranks: int) -> int:
    """Return the size of a rank's shard, which FSDP2 forms of rows."""
    rows = parameter.shape[0]
    return parameter.nbytes // rows * divide_rows(rows, rank, ranks)[1]
