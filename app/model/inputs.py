"""Copy a batch to the device, with an attention mask whose content the model does not have to look at.

A model of transformers asks whether there is any padding (`mask.all()`) before it chooses how to compute attention. On
a GPU the host waits for the answer in each micro-batch, and it waits inside CUDA, where Python cannot raise if another
rank has failed. Batches are formed on the CPU, where the answer is known without waiting.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from app.distributed.collectives import wait_for_device
from app.distributed.world import World

# Modules of transformers in which a classifier uses the mask for bidirectional attention only: it builds a mask of four
# dimensions from it, unless it gets one, and none if there is no padding. Decoders and encoder-decoders use it in other
# ways as well, and models with local attention build a second one.
BIDIRECTIONAL = frozenset(
    f"transformers.models.{name}.modeling_{name}"
    for name in (
        *("albert", "bert", "camembert", "distilbert", "electra", "ernie", "megatron_bert", "mobilebert", "roberta"),
        *("roberta_prelayernorm", "xlm_roberta", "xlm_roberta_xl"),
    )
)
# Modules in which a classifier computes the same without a mask as with one that masks nothing.
OPTIONAL = BIDIRECTIONAL | {"transformers.models.modernbert.modeling_modernbert"}


def to_device(batch: Mapping[str, torch.Tensor], model: torch.nn.Module, world: World) -> dict[str, torch.Tensor]:
    """Copy a batch to this rank's device, without waiting for the copy if the loader pinned its memory.

    The results of the model are bitwise those with the mask of the batch.

    Args:
        batch: as the collator returns it, on the CPU.
        model: the plain model, whose architecture determines the mask. It may be sharded.
    """
    inputs = {name: tensor.to(world.device, non_blocking=True) for name, tensor in batch.items()}
    if "attention_mask" in inputs and _module_of(model) in OPTIONAL and bool(batch["attention_mask"].all()):
        del inputs["attention_mask"]
    return expand_mask(inputs, model)


def expand_mask(inputs: dict[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Replace a mask of tokens, (rows, length), by the mask of attention that the model would build from it."""
    mask = inputs.get("attention_mask")
    if mask is None or _module_of(model) not in BIDIRECTIONAL:
        return inputs
    config: Any = model.config
    if config._attn_implementation != "sdpa" or getattr(config, "is_decoder", False):
        return inputs  # eager attention adds the mask to the scores, and expects numbers
    length = mask.shape[1]
    return inputs | {"attention_mask": mask.bool()[:, None, None, :].expand(-1, 1, length, -1).contiguous()}


def wait_before_mask_is_read(model: torch.nn.Module, world: World) -> None:
    """Let a model that gets a mask of tokens wait for the GPU where a failed rank is noticed, before it waits itself.

    It does so after the collectives that come before the forward pass, such as gathering parameters outside the blocks.
    Encoder-decoders wait once more, at the end of the forward pass, for the positions of the end-of-sequence tokens.
    """
    if world.device.type != "cuda":
        return

    def wait(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.ndim == 2:
            wait_for_device(world)

    model.register_forward_pre_hook(wait, with_kwargs=True)


def _module_of(model: torch.nn.Module) -> str:
    """Return the module that defines the forward pass. The classes of FSDP2 and of subclasses inherit it."""
    module: str = type(model).forward.__module__
    return module
