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

from ..common.errors import UserError
from ..distributed.world import World

# Modules of transformers in which a classifier uses the mask for bidirectional attention only: it builds a mask of four
# dimensions from it, unless it gets one, and none if there is no padding.
BIDIRECTIONAL = {
    f"transformers.models.{name}.modeling_{name}"
    for name in (
        *("albert", "bert", "camembert", "distilbert", "electra", "ernie", "megatron_bert", "mobilebert", "roberta"),
        *("roberta_prelayernorm", "xlm_roberta", "xlm_roberta_xl"),
    )
}
# Models with local attention build a second mask, but they too compute the same without a mask as with one that masks
# nothing.
ENCODERS = BIDIRECTIONAL | {"transformers.models.modernbert.modeling_modernbert"}


def match_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, max_length: int) -> bool:
    """Make the tokenizer return what a model accepts, padded where it changes no logits; tell if there is such a side.

    An input that is not named may be rejected or misinterpreted, but code from a model's folder may pass on any inputs.
    With absolute positions, padding belongs on the right, whatever the tokenizer's configuration says. XLNet, which has
    relative ones, reads its logits from the last position. Convolutions and FNet see the padding on both sides.
    """
    accepted = inspect.signature(model.forward).parameters
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    passes_on &= type(model).__module__.startswith("transformers_modules.")
    names = [name for name in tokenizer.model_input_names if passes_on or name in accepted]
    if "input_ids" not in names:
        raise UserError(f"--model {model.name_or_path}: its forward() does not accept input_ids")
    tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names  # written by save_pretrained
    row = {name: [value] for name, value in tokenizer("0 1 2 3 4 5 6 7").items()}
    width = len(row["input_ids"][0])

    def logits(width: int, side: str) -> torch.Tensor:
        options: Any = {"padding": "max_length", "max_length": width, "padding_side": side, "return_tensors": "pt"}
        return model(**tokenizer.pad(row, **options))[0].double()  # type: ignore[no-any-return]

    tokenizer.padding_side = "right"
    model.eval()  # as `from_pretrained` leaves it; a training step selects its mode itself
    try:
        # Beyond this length, which the probe does not reach, two kinds of rotary embeddings have other frequencies.
        rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
        switches_at = rope.get("original_max_position_embeddings", max_length)
        if rope.get("rope_type") in ("dynamic", "longrope") and max_length > switches_at:
            return False
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            alone = logits(width, "right")
            rounding = 100 * torch.finfo(torch.float32).eps * float(alone.abs().max())
            for side in ("right", "left"):
                padded = torch.cat([logits(longer, side) for longer in (width + 1, width + 3, 2 * width)])
                if (padded - alone).abs().max() <= rounding:
                    tokenizer.padding_side = side
                    return True
    except Exception:  # a token that the model does not have, which `check_rows` reports, or kernels for GPUs only
        return True
    return False


def to_device(batch: Mapping[str, torch.Tensor], model: torch.nn.Module, world: World) -> dict[str, torch.Tensor]:
    """Copy a batch from the collator to this rank's device, without waiting for the copy if its memory is pinned.

    A listed encoder gets the mask that it would build, or none without padding. The results of the plain model, which
    may be sharded, are bitwise those with the mask of the batch.
    """
    inputs = {name: tensor.to(world.device, non_blocking=True) for name, tensor in batch.items()}
    module = type(model).forward.__module__  # that of the plain model, whose method the classes of FSDP2 inherit
    if module not in ENCODERS or "attention_mask" not in batch:
        return inputs
    mask = inputs["attention_mask"]
    config: Any = model.config
    if bool(batch["attention_mask"].all()):
        del inputs["attention_mask"]
    # Eager attention adds the mask to the scores, and expects numbers.
    elif module in BIDIRECTIONAL and config._attn_implementation == "sdpa" and not getattr(config, "is_decoder", False):
        inputs["attention_mask"] = mask.bool()[:, None, None, :].expand(-1, 1, mask.shape[1], -1).contiguous()
    return inputs
