"""What the gradients of a step must be: those of a plain model for each logical rank, added as a tree."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def flat_gradients(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """All gradients in one vector, with zeros for parameters that have none."""
    return flat([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])


def add_neighbors(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """The definition of the tree: add neighbors until one is left. An unpaired last one is carried on."""
    while len(leaves) > 1:
        pairs = [a + b for a, b in zip(leaves[0::2], leaves[1::2], strict=False)]
        leaves = [*pairs, *leaves[2 * len(pairs) :]]
    return leaves[0]


def gradients_of_logical_ranks(
    model: nn.Module, inputs: torch.Tensor, uses_of_second: Sequence[bool]
) -> list[torch.Tensor]:
    """Return the gradients that a copy of a plain model has after the micro-batches of each logical rank.

    Args:
        model: returns a loss.
        inputs: shape (logical ranks, micro-batches of each, …).
        uses_of_second: whether a logical rank uses the model's second layer.
    """
    plain, leaves = copy.deepcopy(model), []
    for micro_batches, use_second in zip(inputs, uses_of_second, strict=True):
        plain.zero_grad()
        for x in micro_batches:
            (plain(x, use_second) / (len(inputs) * len(micro_batches))).backward()
        leaves.append(flat_gradients(list(plain.parameters())).clone())
    return leaves


class Bucket:
    """A gradient bucket as DDP hands it to a communication hook: the gradients are views into its buffer."""

    def __init__(self, indices: Sequence[int], parameters: Sequence[torch.Tensor], is_last: bool) -> None:
        self.indices, self.all_parameters, self.last = indices, parameters, is_last
        self.flat = torch.cat([parameters[i].grad.flatten() for i in indices])

    def gradients(self) -> list[torch.Tensor]:
        sizes = [self.all_parameters[i].numel() for i in self.indices]
        parts = self.flat.split(sizes)
        return [part.view_as(self.all_parameters[i]) for part, i in zip(parts, self.indices, strict=True)]

    def parameters(self) -> list[torch.Tensor]:
        return [self.all_parameters[i] for i in self.indices]

    def buffer(self) -> torch.Tensor:
        return self.flat

    def is_last(self) -> bool:
        return self.last
