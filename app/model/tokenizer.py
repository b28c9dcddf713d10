"""The tokenizer of the built-in models, which is learned from the training rows, offline."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ..common.cache import read_intact, write_intact

MAX_TOKEN_LENGTH = 4  # characters; longer tokens are whole phrases, too rare to learn from a few thousand reviews
FILE_VERSION = 1  # part of the cache key: increase it if `learn_tokenizer` changes
SPECIAL_TOKENS = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}


def cached_tokenizer(texts: Iterable[str], vocabulary_size: int, cache_dir: Path) -> PreTrainedTokenizerFast:
    """Return the result of `learn_tokenizer`, which takes seconds, or the one that an earlier call has written.

    Raises:
        UserError: the cache folder cannot be written.
    """
    texts, digest = list(texts), hashlib.sha256()
    for text in texts:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    recipe = [FILE_VERSION, tokenizers.__version__, vocabulary_size, MAX_TOKEN_LENGTH, SPECIAL_TOKENS]
    recipe.append(digest.hexdigest())
    key = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:32]
    path = cache_dir / f"vocabulary-{key}.json"
    if (content := read_intact(path, key)) is not None:
        return wrap(Tokenizer.from_buffer(content))
    learned = learn_tokenizer(texts, vocabulary_size)
    write_intact(path, key, lambda file: file.write_text(learned.backend_tokenizer.to_str(), encoding="utf-8"))
    return learned


def learn_tokenizer(texts: Iterable[str], vocabulary_size: int) -> PreTrainedTokenizerFast:
    """Learn a BPE tokenizer over characters (Sennrich et al. 2016). From test reviews, it would be a leak.

    It is deterministic: equal texts give identical tokenizers with any number of threads.

    Args:
        vocabulary_size: The maximum number of tokens; few texts have fewer.
    """
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
        pair=f"{cls} $A {sep} $B:1 {sep}:1",
        special_tokens=[(cls, tokenizer.token_to_id(cls)), (sep, tokenizer.token_to_id(sep))],
    )
    return wrap(tokenizer)


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **SPECIAL_TOKENS,
    )
