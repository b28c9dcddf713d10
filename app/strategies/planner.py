"""Formulas for the memory that a training step needs on each rank, from the shapes of the parameters alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from app.strategies.blocks import transformer_blocks
from app.strategies.reduction import MOST_IN_FLIGHT

MOMENTS = 2  # AdamW's moving averages of the gradient and of its square
BUCKET_CAP = 25 * 2**20  # DDP's default, in bytes


@dataclass(frozen=True)
class RankMemory:
    """The memory that one rank needs in a training step besides activations, in bytes.

    Attributes:
        parameters: what the rank holds between two steps: all of them, or its shard.
        gradients: the same for gradients.
        optimizer: AdamW's moments of the parameters that the rank updates.
        gathered: complete parameters of which the rank holds a shard only.
        exchange: complete gradients of a sharded block, and what the other ranks send.
        accumulated: gradients of one logical rank, and partial sums over several.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int = 0
    exchange: int = 0
    accumulated: int = 0

    @property
    def state(self) -> int:
        """Parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """The sum of everything."""
        return self.state + self.gathered + self.exchange + self.accumulated


def plan_memory(
    model: PreTrainedModel,
    strategy: str,
    ranks: int,
    logical_ranks_per_rank: int = 1,
    accumulation_steps: int = 1,
    bucket_cap: int = BUCKET_CAP,
) -> list[RankMemory]:
    """Return the memory of each rank.

    `ddp`: each rank holds everything. `zero1` (Rajbhandari et al. 2020, section 5.1): everything but the moments of the
    parameters that other ranks update; `ZeroRedundancyOptimizer` assigns complete parameters. `zero2` and `zero3`
    (sections 5.2 and 5.3): a shard of everything; FSDP2 divides the rows of each parameter. AdamW's step counters, 4
    bytes per parameter tensor, are left out.

    Args:
        model: only its shapes are used: the parameters may be on the meta device.
        bucket_cap: DDP's bucket size, in bytes.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = sum(_bytes(parameter) for parameter in model.parameters() if not parameter.requires_grad)
    complete = sum(map(_bytes, parameters))
    n_partial_sums = (logical_ranks_per_rank - 1).bit_length()
    in_progress = complete if accumulation_steps > 1 and logical_ranks_per_rank * accumulation_steps > 1 else 0
    if strategy in ("ddp", "zero1"):
        exchange = min(complete, MOST_IN_FLIGHT * max(bucket_cap, *map(_bytes, parameters))) if ranks > 2 else 0
        shares = [complete] * ranks
        if strategy == "zero1":
            groups = [[p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]]
            shares = _assign_largest_first(groups, ranks)
        # The gradients of the logical rank in progress are in DDP's buckets; partial sums are beside them.
        accumulated = n_partial_sums * complete
        return [
            RankMemory(complete + frozen, complete, MOMENTS * share, exchange=exchange, accumulated=accumulated)
            for share in shares
        ]
    blocks = [sum(map(_bytes, block.parameters())) for block in transformer_blocks(model)]
    rest = complete + frozen - sum(blocks)
    # ZeRO-3 gathers the next block while it uses this one.
    gathered = complete + frozen if strategy == "zero2" else rest + sum(sorted(blocks)[-2:])
    exchange = 3 * max([rest, *blocks])  # the gradients of a block, their copy that is sent, and what is received
    plans = []
    for rank in range(ranks):
        shard = sum(_shard_bytes(parameter, rank, ranks) for parameter in parameters)
        frozen_shard = sum(_shard_bytes(p, rank, ranks) for p in model.parameters() if not p.requires_grad)
        accumulated = n_partial_sums * shard + in_progress
        plans.append(RankMemory(shard + frozen_shard, shard, MOMENTS * shard, gathered, exchange, accumulated))
    return plans


def gathered_after_forward(model: PreTrainedModel, strategy: str) -> int:
    """Return the bytes of complete parameters that remain for the backward pass, besides this rank's shards."""
    return sum(map(_bytes, model.parameters())) if strategy == "zero2" else 0


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _assign_largest_first(groups: Sequence[Sequence[torch.Tensor]], ranks: int) -> list[int]:
    """Return the bytes of the parameters that each rank updates: each goes to the rank that has the fewest so far."""
    shares = [0] * ranks
    for group in groups:
        for parameter in sorted(group, key=torch.Tensor.numel, reverse=True):
            shares[shares.index(min(shares))] += _bytes(parameter)
    return shares


def _shard_bytes(parameter: torch.Tensor, rank: int, ranks: int) -> int:
    rows = parameter.shape[0]
    chunk = -(-rows // ranks)
    mine = min(max(rows - rank * chunk, 0), chunk)
    return _bytes(parameter) // rows * mine
