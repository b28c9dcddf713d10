"""Dynamic loss scaling for fp16, in which small gradients would underflow to zero."""

from __future__ import annotations

from typing import Any

import torch

from ..data.sampler import BatchPlan
from ..distributed.world import World

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
