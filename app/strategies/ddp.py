"""Distributed data parallel: every rank holds the complete model and optimizer, and gradients are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from app.distributed.collectives import wait_for_device
from app.distributed.world import World
from app.errors import RunError
from app.settings import Settings
from app.strategies.base import Tensors


class DDP:
    """`torch.nn.parallel.DistributedDataParallel` (Li et al. 2020, "PyTorch Distributed"). Implements `Strategy`."""

    name = "ddp"

    def __init__(self, settings: Settings, world: World) -> None:
        self.settings, self.world = settings, world
        self.gradients_checked = False

    def wrap(self, model: torch.nn.Module) -> DistributedDataParallel:
        """Copy rank 0's weights to all ranks, and hook into backward() to average the gradients. Collective."""
        return DistributedDataParallel(
            model, device_ids=[self.world.device.index] if self.world.device.type == "cuda" else None, **self.options()
        )

    def options(self) -> dict[str, Any]:
        """Return the arguments of `DistributedDataParallel` that follow from the settings."""
        return {
            "find_unused_parameters": self.settings.ddp_find_unused_parameters,
            "bucket_cap_mb": self.settings.ddp_bucket_cap_mb,
        }

    def build_optimizer(self, groups: Sequence[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
        """Return AdamW for all parameters: the averaged gradients are equal, so every rank makes the same update."""
        return torch.optim.AdamW(groups, **options)

    def prepare_resume(self, wrapped: torch.nn.Module, batch: Tensors) -> None:
        """Let DDP rebuild its gradient buckets, as it does after the first backward pass of a run.

        With three ranks or more, the order in which a gradient's parts are added depends on its place in a bucket. A
        resumed run whose first step used the initial buckets would differ from an undisturbed one in the last bit.
        """
        wrapped.train()
        wrapped(**batch).loss.backward()
        self._check_gradients(wrapped)
        wrapped.zero_grad()
        wait_for_device(self.world)

    def no_sync(self, wrapped: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return DDP's context in which gradients are only accumulated."""
        assert isinstance(wrapped, DistributedDataParallel)
        return wrapped.no_sync()

    def clip_grad_norm(self, wrapped: torch.nn.Module, max_norm: float) -> torch.Tensor:
        """Clip by the norm of the averaged gradients, which is equal on every rank.

        Raises:
            RunError: in the first step, a parameter that DDP waits for has no gradient.
        """
        self._check_gradients(wrapped)
        return torch.nn.utils.clip_grad_norm_(wrapped.parameters(), max_norm)

    def gather_model_state(self, model: torch.nn.Module) -> Tensors:
        """Return the state dict on rank 0. Nothing has to be gathered."""
        return dict(model.state_dict()) if self.world.is_main_process else {}

    def load_model_state(self, model: torch.nn.Module, state: Tensors) -> None:
        """Load the state dict on every rank."""
        model.load_state_dict(state)

    def gather_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state dict on rank 0. Nothing has to be gathered."""
        return optimizer.state_dict() if self.world.is_main_process else {}

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load the optimizer's state dict on every rank."""
        optimizer.load_state_dict(state)

    def _check_gradients(self, wrapped: torch.nn.Module) -> None:
        """Check once that backward() has reached every parameter, unless DDP is set to search for unused ones.

        DDP itself raises only in the next forward pass, after a step with gradients that were not averaged. The model
        is the same on every rank, and so is the result of this check.
        """
        if self.gradients_checked or self.settings.ddp_find_unused_parameters:
            return
        self.gradients_checked = True
        unused = [name for name, p in wrapped.named_parameters() if p.requires_grad and p.grad is None]
        if unused:
            raise RunError(
                f"{len(unused)} of the model's parameters, such as {unused[0].removeprefix('module.')}, take no part "
                "in classification: add --ddp_find_unused_parameters"
            )
