"""The inputs of a model: their names, and batches on the device with an attention mask that the host need not read.

A model of transformers asks whether there is any padding (`mask.all()`) before it chooses how to compute attention. On
a GPU the host waits for the answer in each micro-batch. Batches are formed on the CPU, where the answer is known
without waiting.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..distributed.world import World


def _modules(*names: str) -> frozenset[str]:
    return frozenset(f"transformers.models.{name}.modeling_{name}" for name in names)


# Modules of transformers in which a classifier uses the mask for bidirectional attention only: it builds a mask of four
# dimensions from it, unless it gets one, and none if there is no padding.
BIDIRECTIONAL = _modules(
    *("albert", "bert", "camembert", "distilbert", "electra", "ernie", "megatron_bert", "mobilebert", "roberta"),
    *("roberta_prelayernorm", "xlm_roberta", "xlm_roberta_xl"),
)
# Models with local attention build a second mask, but they too compute the same without a mask as with one that masks
# nothing.
ENCODERS = BIDIRECTIONAL | _modules("modernbert")
# Their encoders, and the attention of their decoders to the encoder's output, are bidirectional. The attention of their
# decoders to itself does not get the mask of the batch.
ENCODER_DECODERS = _modules("bart", "mbart")
# Decoders that only build a causal mask of four dimensions from the mask, unless they get one. They compute the same
# without padding, but without a mask they read from the GPU as well, so they keep a mask of tokens then.
CAUSAL = _modules("gpt2", "llama", "qwen2")


def match_inputs(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Make the tokenizer return the inputs that the model accepts, regardless of the tokenizer's configuration.

    Without the attention mask, a model would treat padding as text. An input that it does not name may be rejected or
    misinterpreted.
    """
    accepted = inspect.signature(model.forward).parameters
    if "input_ids" not in accepted:
        return  # a wrapper around the actual model, whose inputs are unknown
    names = [name for name in tokenizer.model_input_names if name in accepted]
    if "attention_mask" in accepted and "attention_mask" not in names:
        names.append("attention_mask")
    if names != list(tokenizer.model_input_names):
        tokenizer.model_input_names = names
        tokenizer.init_kwargs["model_input_names"] = names  # written by save_pretrained


def to_device(batch: Mapping[str, torch.Tensor], model: torch.nn.Module, world: World) -> dict[str, torch.Tensor]:
    """Copy a batch from the collator to this rank's device, without waiting for the copy if its memory is pinned.

    The results of the plain model, which may be sharded, are bitwise those with the mask of the batch.
    """
    inputs = {name: tensor.to(world.device, non_blocking=True) for name, tensor in batch.items()}
    if "attention_mask" in inputs and bool(batch["attention_mask"].all()):
        if _module_of(model) in ENCODERS | ENCODER_DECODERS:
            del inputs["attention_mask"]
        return inputs  # a decoder chooses other kernels without padding than with a mask of four dimensions
    return expand_mask(inputs, model)


def expand_mask(inputs: dict[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Replace a mask of tokens with padding, (rows, length), by the attention mask that the model would build."""
    mask, config = inputs.get("attention_mask"), getattr(model, "config", None)
    if mask is None or getattr(config, "_attn_implementation", None) != "sdpa":
        return inputs  # eager attention adds the mask to the scores, and expects numbers
    length = mask.shape[1]
    expanded = mask.bool()[:, None, None, :].expand(-1, 1, length, -1)
    if _is_causal(model):
        expanded = expanded & torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    elif _module_of(model) not in BIDIRECTIONAL | ENCODER_DECODERS or getattr(config, "is_decoder", False):
        return inputs
    return inputs | {"attention_mask": expanded.contiguous()}


def _module_of(model: torch.nn.Module) -> str:
    """Return the module that defines the forward pass. The classes of FSDP2 and of subclasses inherit it."""
    module: str = type(model).forward.__module__
    return module


def _is_causal(model: torch.nn.Module) -> bool:
    """Tell whether a model is a listed decoder in which each token attends to all earlier ones."""
    decoder: Any = getattr(model, "base_model", model)  # decoders share one class of classifiers
    if not (_module_of(model).startswith("transformers.") and _module_of(decoder) in CAUSAL):
        return False
    layers = getattr(decoder.config, "layer_types", None) or []  # some may attend to a few earlier tokens only
    return getattr(decoder.config, "is_causal", True) and all(kind == "full_attention" for kind in layers)
