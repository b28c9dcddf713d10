"""The interface of a training strategy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

Tensors = dict[str, torch.Tensor]


class Strategy(Protocol):
    """How parameters, gradients and optimizer state are distributed over the ranks.

    `model` is the plain module, and `wrapped` is what `wrap` returned for it. Methods that gather or load are
    collective: under a sharded strategy no rank holds the complete state, so every rank has to take part.
    """

    name: str

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the module whose forward and backward passes train the model on all ranks. Collective."""

    def build_optimizer(self, groups: Sequence[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
        """Return AdamW for the parameters that this rank updates.

        Args:
            groups: parameter groups of the wrapped model.
            options: keyword arguments of AdamW.
        """

    def prepare_resume(self, wrapped: torch.nn.Module, batch: Tensors) -> None:
        """Bring the wrapper to the state that it has after the first step of a run. Collective.

        Call it before the training state is loaded: it draws random numbers and may update buffers.

        Args:
            batch: any batch of training rows.
        """

    def no_sync(self, wrapped: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward() accumulates gradients without reducing them over the ranks."""

    def clip_grad_norm(self, wrapped: torch.nn.Module, max_norm: float) -> torch.Tensor:
        """Scale the gradients down if their global norm exceeds `max_norm`. Collective.

        Returns:
            The norm before clipping, a scalar, equal on every rank.
        """

    def gather_model_state(self, model: torch.nn.Module) -> Tensors:
        """Return the complete state dict on rank 0, and an empty one on the other ranks. Collective."""

    def load_model_state(self, model: torch.nn.Module, state: Tensors) -> None:
        """Load a complete state dict, which every rank passes. Collective."""

    def gather_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the complete optimizer state on rank 0, and an empty one on the other ranks. Collective."""

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load a complete optimizer state, which every rank passes. Collective."""
