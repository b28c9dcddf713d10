"""Make the results of fused AdamW on CPUs independent of where a tensor ends.

PyTorch's kernel updates as many elements at a time as fit into a vector register. The elements that are left at the end
of a tensor are updated by other instructions, which round differently. Which elements these are depends on how a
parameter is sharded. Here they are updated once more, at the beginning of a vector that is padded with zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.adam import adam

from .shards import local_part

VECTOR_BYTES = 64  # of the largest vector registers (AVX-512)
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's state of a parameter, besides its number of steps


class VectorTails:
    """Hooks that run before and after each step of an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Register the hooks of `optimizer`, fused AdamW."""
        # Parameters, and the new tails of each: its own and its moments'.
        self.updated: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = []
        self.on_cpu: bool | None = None  # known from the first step on, when engines have placed the parameters
        optimizer.register_step_pre_hook(self.update)
        optimizer.register_step_post_hook(self.write)

    @torch.no_grad()
    def update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Compute the tails after the step from the state before it."""
        if self.on_cpu is None:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self.on_cpu = any(local_part(parameter).device.type == "cpu" for parameter in parameters)
        if not self.on_cpu:
            return
        self.updated = []
        for group in optimizer.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None and tail_of(p) is not None]
            padded = [[pad(part) for part in self._tails(optimizer, p)] for p in parameters]
            if not padded:
                continue
            weights, gradients, averages, squares = (list(tensors) for tensors in zip(*padded, strict=True))
            steps = [optimizer.state[p]["step"].clone() if optimizer.state[p] else torch.zeros(()) for p in parameters]
            adam(
                weights,
                gradients,
                averages,
                squares,
                [],
                steps,
                fused=True,
                found_inf=getattr(optimizer, "found_inf", None),
                decoupled_weight_decay=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            self.updated += zip(parameters, zip(weights, averages, squares, strict=True), strict=True)

    @torch.no_grad()
    def write(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Replace the tails that the step has written."""
        for parameter, values in self.updated:
            state = optimizer.state[parameter]
            for tensor, value in zip((parameter, *(state[key] for key in MOMENTS)), values, strict=True):
                tail = tail_of(tensor)
                assert tail is not None
                tail.copy_(value[: len(tail)])

    def _tails(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> list[torch.Tensor]:
        """Return the tails of a parameter, its gradient and its moments, which are zero before the first step."""
        state, tail = optimizer.state[parameter], tail_of(parameter)
        assert tail is not None
        assert parameter.grad is not None
        gradient = local_part(parameter.grad).reshape(-1)[-len(tail) :]
        moments = [tail_of(state[key]) if state else torch.zeros_like(tail) for key in MOMENTS]
        return [tail, gradient, *(moment for moment in moments if moment is not None)]


def tail_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a view of the elements that do not fill a vector.

    None if there are none, on a GPU, or if they are not the last ones in memory: a transposed tensor is never sharded.
    """
    local = local_part(tensor.detach())
    n = local.numel() % (VECTOR_BYTES // local.element_size())
    if n == 0 or local.device.type != "cpu" or not local.is_contiguous():
        return None
    return local.view(-1)[-n:]


def pad(tail: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tail that fills a vector."""
    padded = tail.new_zeros(VECTOR_BYTES // tail.element_size())
    padded[: len(tail)] = tail
    return padded
