"""Formulas for the memory that a training step needs on each rank, from the shapes of the parameters alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..distributed.topology import Topology
from ..settings import WRAPPED_IN_DDP
from ..strategies.blocks import sharded_groups
from ..strategies.compression import HOOK_DTYPES
from ..strategies.reduction import buckets_in_flight
from ..strategies.shards import divide_rows
from ..strategies.vector_tails import MOMENTS

N_MOMENTS = len(MOMENTS)  # AdamW's moving averages of the gradient and of its square
BUCKET_CAP = 25 * 2**20  # DDP's default, in bytes


@dataclass(frozen=True)
class RankMemory:
    """The memory that one rank needs in a training step besides activations, in bytes.

    Attributes:
        parameters: what the rank holds between two steps: all of them, or its shard.
        gradients: the same for gradients.
        optimizer: AdamW's moments of the parameters that the rank updates.
        gathered: complete parameters of which the rank holds a shard only.
        exchange: complete gradients of a sharded block, what the other ranks send, and compressed gradients.
        accumulated: complete gradients of the logical rank in progress, beside those that are exchanged.
        partial_sums: gradients of logical ranks that are done, complete or this rank's shard.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int = 0
    exchange: int = 0
    accumulated: int = 0
    partial_sums: int = 0

    @property
    def state(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Everything together, if all of it is needed at the same time."""
        return self.state + self.gathered + self.exchange + self.accumulated + self.partial_sums

    def in_main_memory(self, cpu_offload: bool) -> int:
        """Return what `--cpu_offload` keeps in main memory: what the rank holds shards of."""
        return self.state + self.partial_sums if cpu_offload else 0

    def on_device(self, cpu_offload: bool) -> int:
        """Return the rest."""
        return self.total - self.in_main_memory(cpu_offload)


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What the memory and the traffic of a step depend on besides the model, the strategy and the ranks.

    Attributes:
        bucket_cap: DDP's bucket size in bytes; None: PyTorch's, whose first bucket is smaller.
        comm_hook: `--ddp_comm_hook`, for `ddp` and `zero1`.
        find_unused_parameters: `--ddp_find_unused_parameters`.
        on_gpus: whether NCCL connects the ranks, and not gloo.
    """

    logical_ranks_per_rank: int = 1
    accumulation_steps: int = 1
    bucket_cap: int | None = None
    comm_hook: str = "no"
    find_unused_parameters: bool = False
    on_gpus: bool = False


def plan_memory(
    model: PreTrainedModel,
    strategy: str,
    *,
    topology: Topology,
    options: StepOptions = StepOptions(),  # it is immutable
) -> list[RankMemory]:
    """Return the memory of each rank.

    `ddp`: each rank holds everything. `zero1` (Rajbhandari et al. 2020, section 5.1): everything but the moments of the
    parameters that other ranks update; `ZeroRedundancyOptimizer` assigns complete parameters. `zero2` and `zero3`
    (sections 5.2 and 5.3): a shard of everything; FSDP2 divides the rows of each parameter. AdamW's step counters, 4
    bytes per parameter tensor, are left out.

    Args:
        model: only its shapes are used: the parameters may be on the meta device.
    """
    ranks, comm_hook = topology.ranks, options.comm_hook
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = sum(bytes_of(parameter) for parameter in model.parameters() if not parameter.requires_grad)
    complete = sum(map(bytes_of, parameters))
    n_partial_sums = (options.logical_ranks_per_rank - 1).bit_length()
    in_progress = complete if options.accumulation_steps > 1 else 0
    if strategy in WRAPPED_IN_DDP:
        element = parameters[0].element_size()
        sent = (
            HOOK_DTYPES[comm_hook].itemsize if comm_hook in HOOK_DTYPES else element
        )  # bytes of an element that is exchanged
        buckets = buckets_in_flight(2 if topology.two_levels else 1, options.on_gpus) if ranks > 2 else 0
        received = min(complete, buckets * max(options.bucket_cap or BUCKET_CAP, *map(bytes_of, parameters)))
        exchange = received * sent // element
        if comm_hook in HOOK_DTYPES:  # the rounded copy of every bucket
            exchange += complete * sent // element
        elif comm_hook == "power_sgd":  # all gradients in one buffer, their copy, and the errors of two steps
            exchange = 4 * complete
        shares = [complete] * ranks
        if strategy == "zero1":
            shares = [sum(map(bytes_of, share)) for share in assign_to_ranks(parameters, ranks)]
        # DDP copies gradients into its buckets in the backward pass of the last micro-batch.
        sums = n_partial_sums * complete * sent // element
        return [
            RankMemory(complete + frozen, complete, N_MOMENTS * share, 0, exchange, in_progress, sums)
            for share in shares
        ]
    *blocks, rest = (sum(map(bytes_of, group)) for group in sharded_groups(model))
    # ZeRO-3 gathers the next block while it uses this one.
    gathered = complete + frozen if strategy == "zero2" else rest + sum(sorted(blocks)[-2:])
    exchange = 3 * max([rest, *blocks])  # the gradients of a block, their copy that is sent, and what is received
    plans = []
    for rank in range(ranks):
        shard = sum(_shard_bytes(parameter, rank, ranks) for parameter in parameters)
        frozen_shard = sum(_shard_bytes(p, rank, ranks) for p in model.parameters() if not p.requires_grad)
        sums = n_partial_sums * shard
        plans.append(RankMemory(shard + frozen_shard, shard, N_MOMENTS * shard, gathered, exchange, in_progress, sums))
    return plans


def gathered_after_forward(model: PreTrainedModel, strategy: str) -> int:
    """Return the bytes of complete parameters that remain for the backward pass, besides this rank's shards."""
    return sum(map(bytes_of, model.parameters())) if strategy == "zero2" else 0


def assign_to_ranks(parameters: Sequence[torch.Tensor], ranks: int) -> list[list[torch.Tensor]]:
    """Return the parameters that each rank updates under ZeRO-1, as `ZeroRedundancyOptimizer` assigns them.

    Each one of a parameter group, from the largest to the smallest, goes to the rank that has the fewest elements.
    """
    shares: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    elements = [0] * ranks
    # The groups of `training.optim.build_optimizer`.
    for group in ([p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]):
        for parameter in sorted(group, key=torch.Tensor.numel, reverse=True):
            rank = elements.index(min(elements))
            shares[rank].append(parameter)
            elements[rank] += parameter.numel()
    return shares


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _shard_bytes(parameter: torch.Tensor, rank: int, ranks: int) -> int:
    rows = parameter.shape[0]
    return bytes_of(parameter) // rows * divide_rows(rows, rank, ranks)[1]
