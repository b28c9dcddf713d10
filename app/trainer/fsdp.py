"""Trainer's own FSDP2 (`--fsdp`): like `--strategy zero3`, but the model is sharded by accelerate.

It has not been run on GPUs. The tests run it on CPUs that accelerate is made to treat as GPUs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from ..data.sampler import BatchPlan
from ..distributed.world import World
from ..settings import Settings
from ..strategies.blocks import transformer_blocks
from ..strategies.fsdp import FullyShardStrategy


class TrainerFSDP(FullyShardStrategy):
    """A model that accelerate shards when training begins. Implements `Strategy`.

    NCCL reduces gradients in its own order, so results differ from the other strategies by rounding.
    """

    def __init__(self, settings: Settings, plan: BatchPlan, world: World) -> None:
        super().__init__(settings, plan, world)
        self.name = "fsdp"

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:  # type: ignore[override]
        """Return the model itself: Trainer shards it when training begins."""
        return model

    def accumulate(self, wrapped: torch.nn.Module, number: int) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Return an empty context: Trainer turns off the exchange of gradients until the last micro-batch of a step."""
        return nullcontext()

    def clip_grad_norm(self, wrapped: torch.nn.Module, max_norm: float, loss_scale: torch.Tensor) -> torch.Tensor:
        """Clip by the norm of all shards together. Collective."""
        self.check_gradients(wrapped)
        self.parameters = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
        return super().clip_grad_norm(wrapped, max_norm, loss_scale)


def fsdp_config(model: PreTrainedModel) -> dict[str, Any]:
    """Return Trainer's configuration of FSDP2, which shards the same blocks as `--strategy zero3`.

    Blocks that contain the input embeddings, such as BertEmbeddings, are left out: accelerate shards the embeddings
    themselves, and fails if that has been done already.
    """
    embeddings = model.get_input_embeddings()
    blocks = [block for block in transformer_blocks(model) if all(part is not embeddings for part in block.modules())]
    names = sorted({type(block).__name__ for block in blocks})
    policy = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": names}
    return {"version": 2, "reshard_after_forward": True} | (policy if names else {"auto_wrap_policy": "NO_WRAP"})
