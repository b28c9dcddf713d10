"""Reviews to token ids, once per (rows, tokenizer, length): an Arrow file that every rank of a node maps into
memory."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from datasets import Dataset, Features, Sequence, Value
from datasets.arrow_writer import ArrowWriter
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from app.data.csv_table import CLEANING_RULES, ReviewTable
from app.distributed.collectives import local_main_process_first
from app.distributed.world import World
from app.errors import UserError

CHUNK = 1_000  # reviews tokenised at once
DIGEST_BYTES = hashlib.sha256().digest_size


def tokenize(
    table: ReviewTable,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    cache_dir: Path,
    world: World,
    disable_tqdm: bool = False,
) -> Dataset:
    """A row a review, in the table's order: `input_ids` (and `token_type_ids` where the model wants them), `labels`,
    `length`.

    One process a node writes the file, under another name until it is whole; the rest wait and map it. A file left by
    an earlier run with the same rows, tokenizer and length is used as it is; a damaged one is made again.

    Raises:
        UserError: the cache folder can't be written.
    """
    key = _key(table, tokenizer, max_length)
    path = cache_dir / f"tokens-{key}.arrow"
    with local_main_process_first(world):
        if world.local_rank == 0 and not _is_intact(path, key):
            if path.exists():
                world.print_main(f"{path}: damaged, or from another version: tokenizing again")
            _write(path, key, table, tokenizer, max_length, hide_bar=disable_tqdm or not world.is_main_process)
        try:
            return Dataset.from_file(str(path))
        except (OSError, ValueError) as problem:
            raise UserError(f"--cache_dir {cache_dir}: {path.name} can't be read ({problem}): delete it") from None


def lengths_of(rows: Dataset) -> NDArray[np.int64]:
    """Tokens of each row, int64 (n,)."""
    return np.asarray(rows.with_format("numpy")["length"][:], dtype=np.int64)


def _key(table: ReviewTable, tokenizer: PreTrainedTokenizerBase, max_length: int) -> str:
    inputs = [name for name in tokenizer.model_input_names if name != "attention_mask"]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    recipe = json.loads(backend.to_str()) if backend is not None else tokenizer.get_vocab() | tokenizer.init_kwargs
    recipe |= {"truncation": tokenizer.truncation_side, "padding": None}  # else they tell how it was last called
    words = [table.sha256, CLEANING_RULES, table.class_names, type(tokenizer).__name__, inputs, max_length, recipe]
    digest = hashlib.sha256(json.dumps(words, sort_keys=True, default=str).encode())
    digest.update(table.rows.tobytes() + table.labels.tobytes())
    return digest.hexdigest()[:32]


def _is_intact(path: Path, key: str) -> bool:
    """Tell whether a file ends with the digest of its content, written for this key."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size - DIGEST_BYTES
            return size > 0 and _digest(file, key, size) == file.read()
    except OSError:
        return False


def _digest(file: BinaryIO, key: str, size: int) -> bytes:
    """SHA-256 of a key and the first `size` bytes of a file: a file renamed to another key has the wrong digest."""
    digest = hashlib.sha256(key.encode())
    while size and (chunk := file.read(min(size, 1 << 20))):
        digest.update(chunk)
        size -= len(chunk)
    return digest.digest()


def _write(
    path: Path, key: str, table: ReviewTable, tokenizer: PreTrainedTokenizerBase, max_length: int, hide_bar: bool
) -> None:
    inputs = [name for name in tokenizer.model_input_names if name != "attention_mask"]
    features = Features(
        {name: Sequence(Value("int32")) for name in inputs} | {"labels": Value("int64"), "length": Value("int32")}
    )
    unfinished = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            ArrowWriter(path=str(unfinished), features=features) as writer,
            tqdm(total=len(table), desc="tokenising", unit=" reviews", leave=False, disable=hide_bar) as bar,
        ):
            for start in range(0, len(table), CHUNK):
                texts = table.texts.iloc[start : start + CHUNK].tolist()
                batch: dict[str, Any] = dict(
                    tokenizer(texts, truncation=True, max_length=max_length, return_attention_mask=False)
                )
                batch = {name: batch[name] for name in inputs}
                batch["labels"] = table.labels[start : start + CHUNK]
                batch["length"] = [len(ids) for ids in batch["input_ids"]]
                writer.write_batch(batch)
                bar.update(len(texts))
            writer.finalize()
        with unfinished.open("r+b") as file:
            # Arrow's reader stops at the end of the stream and never sees these bytes.
            file.write(_digest(file, key, unfinished.stat().st_size))
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as problem:
        raise UserError(f"--cache_dir {path.parent}: can't be written: {problem.strerror or problem}") from None
    finally:
        with suppress(OSError):
            unfinished.unlink()
