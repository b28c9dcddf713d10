"""Tokenize reviews, once per (rows, tokenizer, maximum length), into an Arrow file that the ranks memory-map."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import tokenizers
from datasets import Dataset, Features, List, Value
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from ..common.files import cached_file
from .reviews import CLEANING_RULES, ReviewTable

FILE_VERSION = 4  # part of the cache key: increase it if the columns change


def tokenize(
    table: ReviewTable, tokenizer: PreTrainedTokenizerBase, max_length: int, *, cache_dir: Path | None = None
) -> Dataset:
    """Tokenize all reviews, or map the file that an earlier run with the same rows, tokenizer and length has written.

    Args:
        cache_dir: keeps the file, which is complete when it receives its name. By default, the tokens are in memory.

    Returns:
        One row per review, in the order of the table: `input_ids` (and `token_type_ids` if the model uses them), of at
        most `max_length` tokens, and `labels`.

    Raises:
        UserError: The cache folder cannot be written.
    """
    if not hasattr(tokenizer, "backend_tokenizer") or type(tokenizer).__module__.startswith("transformers_modules."):
        cache_dir = None  # the tokens also depend on Python code, or on files, which are not part of the key
    key = _cache_key(table, tokenizer, max_length) if cache_dir is not None else "not cached"
    # The collator creates the attention mask when it pads.
    names = [name for name in tokenizer.model_input_names if name != "attention_mask"]

    def tokenize_batch(batch: Mapping[str, Any]) -> dict[str, Sequence[Sequence[int]]]:
        encoding = tokenizer(batch["review"], truncation=True, max_length=max_length, return_attention_mask=False)
        return {name: encoding[name] for name in names}

    def tokenize_all(**place: Any) -> Dataset:
        columns = pd.DataFrame({"review": table.texts, "labels": table.labels})
        reviews = Dataset(pa.Table.from_pandas(columns, preserve_index=False), fingerprint=key)
        features = Features({name: List(Value("int32")) for name in names} | {"labels": Value("int64")})
        options = {"batched": True, "remove_columns": "review", "features": features, "new_fingerprint": key}
        return reviews.map(tokenize_batch, **options, **place)

    if cache_dir is None:
        return tokenize_all(keep_in_memory=True)
    path = cache_dir / f"tokens-{key}.arrow"
    cached_file(path, lambda file: tokenize_all(cache_file_name=str(file)))
    return Dataset.from_file(str(path))


def lengths_of(rows: Dataset) -> NDArray[np.int64]:
    """Return the number of tokens of each row, int64 (n,)."""
    return np.asarray(pc.list_value_length(rows.data["input_ids"]), dtype=np.int64)


def occurring_tokens(rows: Dataset) -> NDArray[np.int64]:
    """Return the ids of the tokens that occur in the rows, int64, sorted."""
    return np.sort(pc.unique(pc.list_flatten(rows.data["input_ids"]))).astype(np.int64)


def sum_over_tokens(rows: Dataset, score: Callable[[NDArray[np.int32]], NDArray[Any]]) -> NDArray[np.float64]:
    """Return the sum of the scores of the tokens in each row."""
    chunks = rows.data["input_ids"].chunks
    sums = [np.bincount(pc.list_parent_indices(c), score(c.flatten().to_numpy()), len(c)) for c in chunks]
    return np.concatenate(sums)


def describe_unknown(rows: Dataset, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Count the reviews with a quarter or more unknown tokens, not counting special ones; None for none."""
    special, unknown = tokenizer.all_special_ids, tokenizer.unk_token_id
    scores = sum_over_tokens(rows, lambda tokens: ~np.isin(tokens, special) - 3.0 * (tokens == unknown))
    n = int((scores <= 0).sum())
    return f"{n:,} of {len(rows):,} reviews have a quarter or more unknown tokens: does the model fit?" if n else None


def hash_tokens(rows: Dataset, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of the model's input: the tokens of all rows, and how the collator pads them.

    It depends on the tokenizer's effect on these reviews only, not on its path, its file format or its library.
    """
    padding = [tokenizer.padding_side, tokenizer.pad_token_id, tokenizer.pad_token_type_id]
    names = sorted({*rows.column_names} - {"labels"})
    digest = hashlib.sha256(json.dumps([padding, names]).encode())
    digest.update(lengths_of(rows).tobytes())
    for name in names:
        for chunk in rows.data[name].chunks:  # of which only the one in use needs memory
            digest.update(chunk.flatten().to_numpy().data)
    return digest.hexdigest()


def _cache_key(table: ReviewTable, tokenizer: PreTrainedTokenizerBase, max_length: int) -> str:
    """Hash everything that determines the content of the file."""
    # The truncation and padding in the tokenizer's JSON are left over from its previous call. Whether "[SEP]" in a
    # review is the special token is not in it.
    recipe = json.loads(tokenizer.backend_tokenizer.to_str())
    recipe |= {"truncation": tokenizer.truncation_side, "padding": None, "split": tokenizer.split_special_tokens}
    # The bytes of a CSV, in `sha256`, do not tell which of its columns has the texts.
    parts: list[Any] = [FILE_VERSION, table.sha256, table.texts.name, CLEANING_RULES, table.class_names]
    parts += [tokenizers.__version__, type(tokenizer).__name__, tokenizer.model_input_names, max_length, recipe]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode())
    digest.update(table.rows.tobytes() + table.labels.tobytes())
    return digest.hexdigest()[:32]
