"""The objects that update the weights, with the same results on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from torch.optim.adam import adam
from torch.optim.lr_scheduler import LRScheduler

from ..data.batches import BatchPlan
from ..distributed.world import World
from .base import local_part

INITIAL, GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000  # the defaults of torch.amp.GradScaler


def loss_factor(precision: str, plan: BatchPlan) -> int:
    """Return the part of the loss scale that depends on the number of processes.

    The loss of a micro-batch is divided by the number of micro-batches of its process. In fp16 that number must not
    affect which gradients underflow, or the results would depend on the number of processes.
    """
    return plan.logical_ranks_per_rank if precision == "fp16" else 1


class LossScale:
    """Scale the loss, so that small gradients do not become zero in fp16 (Micikevicius et al. 2018).

    The algorithm of `torch.amp.GradScaler`: a step whose gradients overflow is skipped and halves the scale,
    and many steps in a row without an overflow double it. GradScaler looks for overflows in the gradients of one
    process; here their global norm decides, which is equal on every rank however the gradients are sharded. The host
    does not wait for it. The scale is a power of two, so scaling is exact. With other precisions it is always 1.
    """

    def __init__(self, precision: str, plan: BatchPlan, world: World) -> None:
        self.enabled = precision == "fp16"
        self.factor = loss_factor(precision, plan)
        self.value = torch.full((), INITIAL * self.factor if self.enabled else 1.0, device=world.device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=world.device)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.value if self.enabled else loss

    def update(self, grad_norm: torch.Tensor) -> None:
        """Choose the scale of the next step; the norm of this step's gradients is not finite if they overflowed."""
        if not self.enabled:
            return
        finite = torch.isfinite(grad_norm)
        self.good_steps = torch.where(finite, self.good_steps + 1, 0)
        grows = self.good_steps == GROWTH_INTERVAL
        self.value = self.value * torch.where(finite, torch.where(grows, GROWTH, 1.0), BACKOFF)
        self.good_steps = torch.where(grows, 0, self.good_steps)

    def state_dict(self) -> dict[str, Any]:
        return {"value": float(self.value) / self.factor, "good_steps": int(self.good_steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value.fill_(state["value"] * self.factor)
        self.good_steps.fill_(state["good_steps"])


# loss(outputs, labels, step) returns the loss of a micro-batch, a scalar, from the model's outputs, the labels, int64
# (rows,), and the number of optimizer steps before this one.
Loss = Callable[[Any, torch.Tensor, int], torch.Tensor]


def mean_loss(outputs: Any, labels: torch.Tensor, step: int) -> torch.Tensor:
    """Return the model's own loss, the mean cross-entropy of the micro-batch's rows."""
    # If it is infinite, its gradients can be finite. The factor makes them NaN, which all ranks detect; else it is 1.0.
    return outputs.loss * (1 + 0 * outputs.loss.detach())  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Optimization:
    """The optimizer, its schedule, the scale of the loss in fp16, and the loss."""

    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    loss_scale: LossScale
    loss: Loss = mean_loss


VECTOR_BYTES = 64  # of the largest vector registers (AVX-512)
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's state of a parameter, besides its number of steps


class VectorTails:
    """Make the results of fused AdamW on CPUs independent of how a tensor is sharded, by hooks around each step.

    PyTorch's kernel updates the elements at the end of a tensor that do not fill a vector register by instructions that
    round differently. Here they are updated once more, at the beginning of a vector that is padded with zeros.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Parameters, and the new tails of each: its own and its moments'.
        self.updated: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = []
        self.on_cpu: bool | None = None  # known from the first step on, when the parameters are where they stay
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
            padded = [
                [pad(part, (0, VECTOR_BYTES // part.element_size() - len(part))) for part in self._tails(optimizer, p)]
                for p in parameters
            ]
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
