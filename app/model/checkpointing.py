"""Activation checkpointing (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost")."""

from __future__ import annotations

from transformers import PreTrainedModel

from ..common.errors import UserError
from .dropout import contexts_of_checkpointing


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Recompute the activations of each layer in the backward pass, with the same dropout masks.

    Raises:
        UserError: the model does not support it.
    """
    if not model.supports_gradient_checkpointing:
        raise UserError(f"--activation_checkpointing: {type(model).__name__} does not support it: remove the flag")
    # transformers 5.23 warns that it has renamed it.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, "preserve_rng_state": True, "context_fn": contexts_of_checkpointing})
