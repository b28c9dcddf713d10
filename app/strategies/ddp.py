"""Distributed data parallel: every rank holds the whole model and optimizer, and gradients are averaged."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from app.distributed.world import World
from app.settings import Settings
from app.strategies.base import Tensors
from app.training.optim import build_optimizer


class DDP:
    """`torch.nn.parallel.DistributedDataParallel` (Li et al. 2020). The whole state is on every rank."""

    name = "ddp"

    def __init__(self, settings: Settings, world: World) -> None:
        self.settings, self.world = settings, world

    def wrap(self, model: torch.nn.Module) -> DistributedDataParallel:
        """Broadcast rank 0's weights, and hook into backward() to average the gradients. Collective."""
        return DistributedDataParallel(
            model,
            device_ids=[self.world.device.index] if self.world.device.type == "cuda" else None,
            find_unused_parameters=self.settings.ddp_find_unused_parameters,
            bucket_cap_mb=self.settings.ddp_bucket_cap_mb,
        )

    def build_optimizer(self, wrapped: torch.nn.Module, settings: Settings, learning_rate: float) -> torch.optim.AdamW:
        """Return AdamW over all parameters: averaged gradients are equal, so every rank makes the same step."""
        return build_optimizer(wrapped, settings, learning_rate)

    def no_sync(self, wrapped: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return DDP's context in which gradients are only accumulated."""
        assert isinstance(wrapped, DistributedDataParallel)
        return wrapped.no_sync()

    def clip_grad_norm(self, wrapped: torch.nn.Module, max_norm: float) -> torch.Tensor:
        """Clip by the norm of the averaged gradients, which every rank has."""
        return torch.nn.utils.clip_grad_norm_(wrapped.parameters(), max_norm)

    def gather_model_state(self, model: torch.nn.Module) -> Tensors:
        """Return the state dict on rank 0; there is nothing to gather."""
        return dict(model.state_dict()) if self.world.is_main_process else {}

    def load_model_state(self, model: torch.nn.Module, state: Tensors) -> None:
        """Load the state dict, on every rank."""
        model.load_state_dict(state)

    def gather_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state dict on rank 0; there is nothing to gather."""
        return optimizer.state_dict() if self.world.is_main_process else {}

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load the optimizer's state dict, on every rank."""
        optimizer.load_state_dict(state)
