"""The built-in models, which need no download: `tiny`, the default, and `tiny-bert`.

Both learn their vocabulary from the training rows. `tiny` is a ModernBERT (Warner et al. 2024) with one layer. It is
trained on a few thousand reviews, so its design and its initial weights provide what would take far more of them to
learn:

- embeddings of tokens, learned from their neighbors in the training rows, without labels;
- attention heads that attend to the two previous and the two next tokens, for phrases such as "not good";
- the mean over all tokens as the vector of a review, instead of that of a special token.

`tiny-bert` is a BERT with random weights, for measurements of the architecture that most users fine-tune.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import BertConfig, ModernBertConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..setting_groups import TINY, TINY_BERT
from .cooccurrence import cached_embeddings, learn_embeddings

VOCABULARY_SIZES = {TINY: 4_000, TINY_BERT: 8_000}
HIDDEN_SIZE = 128
OFFSETS = (-1, 1, -2, 2)  # one attention head each
SHARPNESS = 12.0  # of the attention before training: the tokens next to the offset get a weight of about e^-8
FREQUENCIES = 4  # the rotary frequencies that tell the offsets apart; the lower ones hardly differ between them


def built_in_config(model: str, vocabulary_size: int, pad_token_id: int | None) -> PretrainedConfig:
    """Return the config of a built-in model."""
    if model == TINY_BERT:  # about 1.5 million parameters
        return BertConfig(
            vocab_size=vocabulary_size,
            pad_token_id=pad_token_id,
            hidden_size=HIDDEN_SIZE,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=512,
            max_position_embeddings=512,
        )
    return ModernBertConfig(  # about 0.7 million parameters
        vocab_size=vocabulary_size,
        pad_token_id=pad_token_id,
        bos_token_id=None,  # like the next three: unused, and the defaults are not in this vocabulary
        eos_token_id=None,
        cls_token_id=None,
        sep_token_id=None,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=1,
        layer_types=["sliding_attention"],
        local_attention=2 * max(OFFSETS),
        num_attention_heads=len(OFFSETS),
        attention_bias=True,  # which `attend_to_neighbors` sets
        intermediate_size=256,
        classifier_pooling="mean",
        embedding_dropout=0.5,
        attention_dropout=0.3,
        mlp_dropout=0.3,
        classifier_dropout=0.3,
    )


def embeddings_of(
    model: str, tokenizer: PreTrainedTokenizerBase, train_texts: Iterable[str], *, cache_dir: Path | None = None
) -> NDArray[np.float32] | None:
    """Learn the initial embeddings of `tiny` from the training rows; None for any other model.

    Args:
        cache_dir: keeps what is learned, for later calls with the same rows.

    Returns:
        The result of `learn_embeddings`.

    Raises:
        UserError: the cache folder cannot be written.
    """
    if model != TINY:
        return None
    rows = tokenizer(list(train_texts), add_special_tokens=False, verbose=False)["input_ids"]
    if cache_dir is None:
        return learn_embeddings(rows, len(tokenizer), HIDDEN_SIZE)
    return cached_embeddings(rows, len(tokenizer), HIDDEN_SIZE, cache_dir=cache_dir)


@torch.no_grad()
def initialize(model: PreTrainedModel, embeddings: NDArray[np.float32]) -> None:
    """Initialize the attention of `tiny` and the embeddings that were learned; other tokens keep random ones."""
    weight: Any = model.get_input_embeddings().weight
    learned = torch.from_numpy(embeddings).to(weight.dtype)
    weight.copy_(torch.where(learned.any(dim=1, keepdim=True), learned, weight))
    attend_to_neighbors(model)


@torch.no_grad()
def attend_to_neighbors(model: PreTrainedModel) -> None:
    """Set the biases of queries and keys so that each attention head attends to the token at one of `OFFSETS`.

    Rotary embeddings (Su et al. 2021) rotate pairs of dimensions by angles that are proportional to the position. So
    the product of a query and of a key that is the query rotated back by an offset is the largest at that offset.
    """
    encoder: Any = model.base_model
    attention = encoder.layers[0].attn
    frequencies = encoder.rotary_emb.sliding_attention_inv_freq[:FREQUENCIES]
    angles = torch.tensor(OFFSETS).unsqueeze(1) * frequencies  # (heads, frequencies)
    scale = math.sqrt(SHARPNESS * math.sqrt(attention.head_dim))  # attention divides scores by the last factor
    # A pair of dimensions consists of one of a head's first half and one of its second half.
    queries, keys, _ = attention.Wqkv.bias.view(3, len(OFFSETS), 2, attention.head_dim // 2)
    queries[:, 0, :FREQUENCIES] = scale
    keys[:, 0, :FREQUENCIES] = scale * angles.cos()
    keys[:, 1, :FREQUENCIES] = scale * -angles.sin()
