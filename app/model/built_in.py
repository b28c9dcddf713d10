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
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import sklearn
import tokenizers
import torch
from datasets.fingerprint import Hasher
from numpy.typing import NDArray
from scipy import sparse
from sklearn.utils.extmath import randomized_svd
from threadpoolctl import threadpool_limits
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    ModernBertConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from ..common.files import cached_file
from ..setting_groups import TINY, TINY_BERT

FILE_VERSION = 2  # part of the names of cached files: increase it if what is learned changes
VOCABULARY_SIZES = {TINY: 4_000, TINY_BERT: 8_000}
MAX_TOKEN_LENGTH = 4  # characters; longer tokens are whole phrases, too rare to learn from a few thousand reviews
SPECIAL_TOKENS = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
HIDDEN_SIZE = 128
OFFSETS = (-1, 1, -2, 2)  # one attention head each
SHARPNESS = 12.0  # of the attention before training: the tokens next to the offset get a weight of about e^-8
FREQUENCIES = 4  # the rotary frequencies that tell the offsets apart; the lower ones hardly differ between them
WINDOW = 5  # tokens to each side that are neighbors
SMOOTHING = 0.75  # of the counts of neighbors, as in word2vec: otherwise rare tokens have the highest PMI
STANDARD_DEVIATION = 0.3  # of the embeddings' elements


def learn_tokenizer(
    texts: Iterable[str], vocabulary_size: int, cache_dir: Path | None = None
) -> PreTrainedTokenizerFast:
    """Learn a BPE tokenizer over characters (Sennrich et al. 2016). From test reviews, it would be a leak.

    It is deterministic: equal texts give identical tokenizers with any number of threads.

    Args:
        vocabulary_size: The maximum number of tokens; few texts have fewer.
        cache_dir: Keeps what is learned, which takes seconds, for later calls with the same texts.

    Raises:
        UserError: The cache folder cannot be written.
    """
    if cache_dir is None:
        tokenizer = train_bpe(texts, vocabulary_size)
    else:
        texts = list(texts)
        recipe = [FILE_VERSION, tokenizers.__version__, vocabulary_size, MAX_TOKEN_LENGTH, SPECIAL_TOKENS, texts]
        path = cache_dir / f"vocabulary-{Hasher.hash(recipe)}.json"
        cached_file(path, lambda file: train_bpe(texts, vocabulary_size).save(str(file)))
        tokenizer = Tokenizer.from_file(str(path))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=["input_ids", "attention_mask"], **SPECIAL_TOKENS
    )


def train_bpe(texts: Iterable[str], vocabulary_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL_TOKENS["unk_token"]))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation(), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        max_token_length=MAX_TOKEN_LENGTH,
        special_tokens=list(SPECIAL_TOKENS.values()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    cls, sep = SPECIAL_TOKENS["cls_token"], SPECIAL_TOKENS["sep_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        special_tokens=[(cls, tokenizer.token_to_id(cls)), (sep, tokenizer.token_to_id(sep))],
    )
    return tokenizer


def built_in_config(model: str, vocabulary_size: int, pad_token_id: int | None) -> PretrainedConfig:
    """Return the config of a built-in model."""
    shared: dict[str, Any] = {"vocab_size": vocabulary_size, "pad_token_id": pad_token_id, "hidden_size": HIDDEN_SIZE}
    if model == TINY_BERT:  # about 1.5 million parameters
        return BertConfig(**shared, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512)
    # The defaults of these are not in this vocabulary.
    unused: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"))
    return ModernBertConfig(  # about 0.7 million parameters
        **shared | unused,
        num_hidden_layers=1,
        layer_types=["sliding_attention"],
        local_attention=2 * max(OFFSETS),
        num_attention_heads=len(OFFSETS),
        attention_bias=True,  # which `initialize` sets
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
    """Learn the initial embeddings of `tiny` from the training rows, as `learn_embeddings`; None for any other model.

    Args:
        cache_dir: keeps what is learned, for later calls with the same rows.
    """
    if model != TINY:
        return None
    texts = list(train_texts)

    def learn() -> NDArray[np.float32]:
        rows = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return learn_embeddings(rows, len(tokenizer), HIDDEN_SIZE)

    if cache_dir is None:
        return learn()
    versions = [FILE_VERSION, np.__version__, scipy.__version__, sklearn.__version__]
    recipe = [*versions, WINDOW, SMOOTHING, STANDARD_DEVIATION, HIDDEN_SIZE, tokenizer.backend_tokenizer.to_str()]
    path = cache_dir / f"embeddings-{Hasher.hash([*recipe, texts])}.npy"
    cached_file(path, lambda file: np.save(file, learn()))
    return np.load(path)  # type: ignore[no-any-return]


@torch.no_grad()
def initialize(model: PreTrainedModel, embeddings: NDArray[np.float32]) -> None:
    """Initialize the attention of `tiny` and the embeddings that were learned; other tokens keep random ones."""
    weight: Any = model.get_input_embeddings().weight
    learned = torch.from_numpy(embeddings).to(weight.dtype)
    weight.copy_(torch.where(learned.any(dim=1, keepdim=True), learned, weight))
    # The biases of queries and keys make each attention head attend to the token at one of OFFSETS. Rotary embeddings
    # (Su et al. 2021) rotate pairs of dimensions by angles that are proportional to the position. So the product of a
    # query and of a key that is the query rotated back by an offset is the largest at that offset.
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


def learn_embeddings(rows: Sequence[Sequence[int]], vocabulary_size: int, size: int) -> NDArray[np.float32]:
    """Factorize the positive pointwise mutual information of neighboring tokens (Levy, Goldberg and Dagan 2015).

    Equal rows give bitwise equal embeddings on one kind of CPU, with any number of threads. Do not pass test
    reviews: the model would learn from them.

    Args:
        rows: the token ids of each text.

    Returns:
        float32 (vocabulary_size, size). Tokens without neighbors have zeros.
    """
    information = positive_information(count_neighbors(rows, vocabulary_size))
    with threadpool_limits(limits=1):  # the number of threads affects rounding
        left, singular_values, _ = randomized_svd(information, min(size, vocabulary_size), random_state=0)
    # The square root of the singular values weights the largest ones less: section 3.3 of the paper recommends it.
    vectors = np.pad(left * np.sqrt(singular_values), ((0, 0), (0, size - left.shape[1])))
    vectors[information.sum(axis=1) == 0] = 0  # they may differ from zero by rounding
    deviation = vectors.std()
    return (vectors * (STANDARD_DEVIATION / deviation if deviation > 0 else 0)).astype(np.float32)


def count_neighbors(rows: Sequence[Sequence[int]], vocabulary_size: int) -> sparse.csr_array:
    """Return how often each token occurs within `WINDOW` tokens of each other one, float64 (vocabulary, vocabulary)."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    ids = np.fromiter(chain.from_iterable(rows), np.int64, lengths.sum())
    # One row per token of the texts, with a one in its column, and WINDOW empty rows behind each text: the product of
    # this matrix with itself, shifted by a distance, counts the pairs of tokens at that distance.
    places = np.arange(len(ids)) + WINDOW * np.repeat(np.arange(len(lengths)), lengths)
    shape = (len(ids) + WINDOW * len(lengths), vocabulary_size)
    tokens = sparse.csr_array((np.ones(len(ids)), (places, ids)), shape)
    ahead = sum(
        (tokens[:-distance].T @ tokens[distance:] for distance in range(1, WINDOW + 1)),
        start=sparse.csr_array((vocabulary_size, vocabulary_size)),
    )
    return sparse.csr_array(ahead + ahead.T)


def positive_information(counts: sparse.csr_array) -> sparse.csr_array:
    """Return log(P(token, neighbor) / (P(token) P(neighbor))) where it is positive, otherwise 0."""
    of_tokens = counts.sum(axis=1)
    of_neighbors = of_tokens**SMOOTHING  # the counts are symmetric
    pairs = sparse.coo_array(counts)
    expected = of_tokens[pairs.row] * of_neighbors[pairs.col] / of_neighbors.sum()
    information = np.maximum(np.log(pairs.data / expected), 0)
    return sparse.csr_array((information, (pairs.row, pairs.col)), counts.shape)
