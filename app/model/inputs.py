"""The inputs of a model: their names, and batches on the device with an attention mask that the host need not read.

A model of transformers asks whether there is any padding (`mask.all()`) before it chooses how to compute attention. On
a GPU the host waits for the answer in each micro-batch. Batches are formed on the CPU, where the answer is known
without waiting.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import FULL_TOKENIZER_FILE

from ..common.errors import UserError
from ..distributed.world import World
from ..setting_groups import BUILT_IN
from ..settings import Settings
from .hub import first_line, model_folder

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
TEXTS = ("0 1 2 3 4 5 6 7", "7 5 3")


def match_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, settings: Settings) -> str | None:
    """Make the tokenizer return the inputs that a model accepts, padded on the side where that changes no logits.

    Unless the settings name an attention implementation, a model whose logits differ in eager attention gets sdpa.
    With absolute positions, padding belongs on the right, whatever the tokenizer's configuration says. XLNet, which has
    relative ones, reads its logits from the last position. Convolutions and FNet see the padding on both sides.

    Returns:
        What the logits depend on besides the text, None for nothing else.

    Raises:
        UserError: The model cannot compute logits, or they do not depend on the text.
    """
    accepted = inspect.signature(model.forward).parameters
    # Models of transformers also accept any keyword, but ignore or misinterpret an input that they do not name.
    has_kwargs = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    takes_any = has_kwargs and type(model).__module__.startswith("transformers_modules.")
    names = [name for name in tokenizer.model_input_names if takes_any or name in accepted]
    if "input_ids" not in names:
        raise UserError(f"--model {settings.model}: its forward() does not accept input_ids")
    tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names  # written by save_pretrained

    def logits(text: str, side: str = "right", paddings: Sequence[int] = (0,)) -> torch.Tensor:
        row = {name: [value] for name, value in tokenizer(text).items()}
        options: Any = {"padding": "max_length", "padding_side": side, "return_tensors": "pt"}
        widths = [len(row["input_ids"][0]) + padding for padding in paddings]
        return torch.cat([model(**tokenizer.pad(row, max_length=width, **options))[0].double() for width in widths])

    model.eval()  # as `from_pretrained` leaves it; a training step selects its mode itself
    # Beyond this length, which the probe does not reach, two kinds of rotary embeddings have other frequencies.
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    switches_at = rope.get("original_max_position_embeddings") or settings.max_length
    switches = rope.get("rope_type") in ("dynamic", "longrope") and settings.max_length > switches_at
    runs_here = settings.use_cpu or not torch.cuda.is_available()  # otherwise its kernels may be for GPUs only
    alone, other, side = torch.zeros(1), torch.zeros(1), "right"
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            is_eager = settings.attn_implementation is None and model.config._attn_implementation == "eager"
            if is_eager and model._supports_sdpa:
                # Falcon's eager attention adds ALiBi twice, Gemma's is causal even if its config says otherwise, and in
                # fp64 ModernBERT's has a softmax in fp32, in which the mask of padding overflows to NaN.
                eager, model.config._attn_implementation = logits(TEXTS[0], "right", (0, 3)), "sdpa"
                if (logits(TEXTS[0], "right", (0, 3)) - eager).abs().max() <= 1e-3 * eager.abs().max():
                    model.config._attn_implementation = "eager"
            alone, other = map(logits, TEXTS)
            expected = torch.cat([alone, other]).repeat_interleave(3, dim=0)
            rounding = 100 * torch.finfo(torch.float32).eps * float(expected.abs().max())
            padded = ((s, torch.cat([logits(text, s, (1, 3, 10)) for text in TEXTS])) for s in ("right", "left"))
            side = next((s for s, found in padded if (found - expected).abs().max() <= rounding), "")
    except Exception as problem:  # such as a token that the model does not have, which `check_rows` reports
        if runs_here and isinstance(problem, AttributeError | KeyError | TypeError):
            raise UserError(f"--model {settings.model}: its forward() fails: {first_line(problem)}") from None
        side = "right"
    if runs_here and not alone.isfinite().all():
        raise UserError(f"--model {settings.model}: its logits are not finite: do its weights have NaN?")
    differ = len({frozenset(tokenizer(text)["input_ids"]) for text in TEXTS}) > 1  # of equal tokens, a mean is the same
    if runs_here and differ and alone.equal(other) and alone.any():
        raise UserError(f"--model {settings.model}: its logits are the same for every text")
    tokenizer.padding_side = side or "right"
    return None if side and not switches else "its logits depend on how far a batch is padded"


def describe_tokenizer_file(tokenizer: PreTrainedTokenizerBase, settings: Settings, texts: Sequence[str]) -> str | None:
    """Count the texts that get other tokens than by the model's tokenizer.json alone; None for none.

    For many classes of tokenizers, transformers, and so `pipeline`, takes only the vocabulary of that file: they may
    lack its normalizer, such as one that lowercases.
    """
    file = None if settings.model in BUILT_IN else Path(model_folder(settings), FULL_TOKENIZER_FILE)
    if file is None or not file.is_file():
        return None
    alone = Tokenizer.from_file(str(file))
    alone.no_truncation()
    beginnings = [text[:1_000] for text in texts]
    expected = [encoding.ids for encoding in alone.encode_batch(beginnings, add_special_tokens=False)]
    n = sum(map(operator.ne, expected, tokenizer(beginnings, add_special_tokens=False)["input_ids"]))
    how = f"transformers' {type(tokenizer).__name__} uses only the vocabulary of {FULL_TOKENIZER_FILE}"
    return f"{how}: {n} of the first {len(texts)} reviews would have other tokens with all of it" if n else None


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
