"""Formulas for the memory that a strategy needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

MOMENTS = 2  # AdamW's moving averages of the gradient and of its square


def training_state_bytes(groups: Sequence[Sequence[torch.Tensor]], strategy: str, ranks: int) -> list[int]:
    """Return the bytes of parameters, gradients and optimizer state that each rank holds between two steps.

    `ddp`: everything. `zero1` (Rajbhandari et al. 2020, section 5.1): everything but the moments of the parameters that
    other ranks update; `ZeroRedundancyOptimizer` assigns whole parameters. `zero2` and `zero3` (sections 5.2, 5.3): a
    shard of everything; FSDP2 divides the rows of each parameter. The step counters of AdamW, 4 bytes per parameter
    tensor, are left out, as are activations, gathered parameters and buffers for communication.

    Args:
        groups: the complete parameters, in the optimizer's groups.
    """
    complete = sum(_bytes(parameter) for group in groups for parameter in group)
    if strategy == "ddp":
        return [complete * (2 + MOMENTS)] * ranks
    if strategy == "zero1":
        return [complete * 2 + MOMENTS * share for share in _assign_largest_first(groups, ranks)]
    return [
        (2 + MOMENTS) * sum(_shard_bytes(parameter, rank, ranks) for group in groups for parameter in group)
        for rank in range(ranks)
    ]


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
