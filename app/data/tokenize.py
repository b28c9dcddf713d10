"""Tokenize reviews, once per (rows, tokenizer, maximum length), into an Arrow file that the ranks memory-map."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from numpy.typing import NDArray
from torch.utils.data import Dataset as TorchDataset
from tqdm import tqdm
from transformers import BatchEncoding, PreTrainedTokenizerBase

from ..common.files import cached_file
from ..common.terminal import hides_progress
from ..distributed.collectives import local_main_process_first
from ..distributed.world import World
from .reviews import CLEANING_RULES, ReviewTable

FILE_VERSION = 3  # part of the cache key: increase it if the columns change
CHUNK = 1_000  # reviews that are tokenized at once
OWN_COLUMNS = {"labels": pa.int64(), "length": pa.int32(), "truncated": pa.bool_()}


def tokenize(
    table: ReviewTable,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    *,
    cache_dir: Path,
    world: World,
    disable_tqdm: bool = False,
) -> Dataset:
    """Tokenize all reviews, or map the file that an earlier run with the same rows, tokenizer and length has written.

    One process per node writes the file while the others wait. The file is complete when it receives its name.

    Returns:
        One row per review, in the order of the table: `input_ids` (and `token_type_ids` if the model uses them),
        `labels`, `length` (tokens after truncation) and `truncated`.

    Raises:
        UserError: The cache folder cannot be written.
    """
    path = cache_dir / f"tokens-{_cache_key(table, tokenizer, max_length)}.arrow"
    hide_bar = hides_progress(disable_tqdm, world.is_main_process)

    def write(file: Path) -> None:
        with file.open("wb") as out, pa.ipc.new_stream(out, _schema(tokenizer)) as writer:
            for batch in _tokenize(table, tokenizer, max_length, hide_bar=hide_bar):
                writer.write_batch(batch)

    with local_main_process_first(world):
        cached_file(path, write)
        return Dataset.from_file(str(path))


def tokenize_in_memory(table: ReviewTable, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    """Tokenize all reviews as `tokenize` does, without a file."""
    return Dataset(pa.Table.from_batches(_tokenize(table, tokenizer, max_length), _schema(tokenizer)))


class TokenRows(TorchDataset[dict[str, Any]]):
    """Rows for a `DataLoader`: token ids as views of the memory-mapped file, and the label.

    `Dataset` would convert each batch to lists of Python integers, which takes longer than padding them.
    """

    def __init__(self, rows: Dataset, positions: NDArray[np.int64]) -> None:
        """Select the rows at `positions` of a data set as returned by `tokenize`."""
        self.positions = positions
        names = [name for name in rows.column_names if name not in OWN_COLUMNS]
        # Of each chunk, where each list begins and ends, and the values of all lists in order.
        self.columns = {
            name: [(chunk.offsets.to_numpy(), chunk.values.to_numpy()) for chunk in _chunks(rows, name)]
            for name in names
        }
        self.labels = [chunk.to_numpy() for chunk in _chunks(rows, "labels")]
        self.starts = np.cumsum([0, *map(len, self.labels)])

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = int(self.positions[index])
        chunk = int(np.searchsorted(self.starts, row, side="right")) - 1
        row -= int(self.starts[chunk])
        found: dict[str, Any] = {"labels": int(self.labels[chunk][row])}
        for name, chunks in self.columns.items():
            offsets, values = chunks[chunk]
            found[name] = values[offsets[row] : offsets[row + 1]]
        return found


def lengths_of(rows: Dataset) -> NDArray[np.int64]:
    """Return the number of tokens of each row after truncation, int64 (n,)."""
    return np.asarray(rows.data["length"], dtype=np.int64)


def count_truncated(rows: Dataset) -> int:
    """Return the number of reviews with more than `max_length` tokens."""
    return int(np.count_nonzero(rows.data["truncated"]))


def occurring_tokens(rows: Dataset) -> NDArray[np.int64]:
    """Return the ids of the tokens that occur in the rows, int64, sorted."""
    found = [np.unique(chunk.flatten()) for chunk in _chunks(rows, "input_ids")]
    return np.unique(np.concatenate(found)).astype(np.int64)


def count_of_tokens(rows: Dataset, ids: Collection[int]) -> NDArray[np.int64]:
    """Return how many tokens of each row are among some ids, int64 (n,)."""
    counts = []
    for chunk in _chunks(rows, "input_ids"):
        hits = np.isin(chunk.flatten(), list(ids))
        rows_of_tokens = np.repeat(np.arange(len(chunk)), chunk.value_lengths())
        counts.append(np.bincount(rows_of_tokens[hits], minlength=len(chunk)))
    return np.concatenate(counts)


def hash_tokens(rows: Dataset, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of the model's input: the tokens of all rows, and how the collator pads them.

    It depends on the tokenizer's effect on these reviews only, not on its path, its file format or its library.
    """
    padding = [tokenizer.padding_side, tokenizer.pad_token_id, tokenizer.pad_token_type_id]
    names = sorted({*rows.column_names} - {*OWN_COLUMNS})
    digest = hashlib.sha256(json.dumps([padding, names]).encode())
    digest.update(lengths_of(rows).tobytes())
    for name in names:
        for chunk in _chunks(rows, name):
            digest.update(chunk.flatten().to_numpy().data)
    return digest.hexdigest()


def _chunks(rows: Dataset, name: str) -> list[pa.Array]:
    """Return a column in parts of `CHUNK` rows, of which only those in use need memory."""
    chunks: list[pa.Array] = rows.data[name].chunks
    return chunks


def _input_names(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    # The collator creates the attention mask when it pads.
    return [name for name in tokenizer.model_input_names if name != "attention_mask"]


def _schema(tokenizer: PreTrainedTokenizerBase) -> pa.Schema:
    return pa.schema(dict.fromkeys(_input_names(tokenizer), pa.list_(pa.int32())) | OWN_COLUMNS)


def _cache_key(table: ReviewTable, tokenizer: PreTrainedTokenizerBase, max_length: int) -> str:
    """Hash everything that determines the content of the file."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    recipe = json.loads(backend.to_str()) if backend is not None else tokenizer.get_vocab() | tokenizer.init_kwargs
    # The backend's own truncation and padding are left over from its previous call. It does not write into its JSON
    # whether "[SEP]" in a review is the special token.
    recipe |= {"truncation": tokenizer.truncation_side, "padding": None, "split": tokenizer.split_special_tokens}
    parts = [FILE_VERSION, table.sha256, CLEANING_RULES, table.class_names, type(tokenizer).__name__]
    parts += [_input_names(tokenizer), max_length, recipe]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode())
    digest.update(table.rows.tobytes() + table.labels.tobytes())
    return digest.hexdigest()[:32]


def _tokenize(
    table: ReviewTable, tokenizer: PreTrainedTokenizerBase, max_length: int, *, hide_bar: bool = True
) -> Iterator[pa.RecordBatch]:
    """Tokenize all reviews, `CHUNK` at once. Tokenizers that are written in Rust use all cores of the process."""
    with tqdm(total=len(table), desc="tokenizing", unit=" reviews", leave=False, disable=hide_bar) as bar:
        for start in range(0, len(table), CHUNK):
            texts = table.texts.iloc[start : start + CHUNK].tolist()
            encoding = tokenizer(texts, truncation=True, max_length=max_length, return_attention_mask=False)
            columns = {name: _lists(encoding[name]) for name in _input_names(tokenizer)} | {
                "labels": table.labels[start : start + CHUNK],
                "length": np.fromiter(map(len, encoding["input_ids"]), np.int32, len(texts)),
                "truncated": _were_truncated(texts, encoding, tokenizer=tokenizer, max_length=max_length),
            }
            yield pa.RecordBatch.from_pydict(columns, _schema(tokenizer))
            bar.update(len(texts))


def _lists(lists: list[list[int]]) -> pa.ListArray:
    """Convert lists of integers through one flat array, which is faster than converting one list after another."""
    offsets = np.cumsum([0, *map(len, lists)], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, np.fromiter(chain.from_iterable(lists), np.int32, offsets[-1]))


def _were_truncated(
    texts: list[str], encoding: BatchEncoding, *, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> list[bool]:
    if encoding.encodings is not None:
        return [bool(row.overflowing) for row in encoding.encodings]
    # Tokenizers written in Python discard what they cut off. Only a review of maximum length can have been cut.
    return [
        len(ids) == max_length and len(tokenizer(text)["input_ids"]) > max_length
        for text, ids in zip(texts, encoding["input_ids"], strict=True)
    ]
