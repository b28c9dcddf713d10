"""Load reviews with the library `datasets`: a CSV, JSON Lines or Parquet file, a folder of them, or a Hub data set.

`datasets` converts what it reads once, piece by piece, into an Arrow file in the cache, which all processes of a node
map: the reviews may be larger than the memory.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pandas as pd

from ..common.errors import UserError, list_names, shorten
from ..common.files import check_exists
from ..settings import Settings

BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # everything else is a CSV
# Chinese text in GB18030 is hardly ever valid UTF-8, but many texts in UTF-8 are valid GB18030.
ENCODINGS = ("utf-8-sig", "gb18030")


@dataclass(frozen=True)
class Source:
    """The rows of one part."""

    path: Path  # the file or data set, for messages
    table: datasets.Dataset
    sha256: str | None = None  # of the bytes of a CSV file; None for anything else


def open_sources(settings: Settings, cache_dir: Path | None = None) -> dict[str, Source]:
    """Load the rows of all parts, in the order training, validation and test rows.

    Args:
        settings: They name files, or a data set: a folder, or `OWNER/NAME` on the Hugging Face Hub, with `/CONFIG` if
            it has several.
        cache_dir: keeps what `datasets` has read. By default, it is in memory.

    Raises:
        UserError: There is no such file or data set, it cannot be read, or it has no rows or no training rows.
    """
    name = settings.dataset_name
    if name is None:
        files = {"train": settings.csv_path, "validation": settings.validation_file, "test": settings.test_file}
        return {part: open_file(Path(path), cache_dir) for part, path in files.items() if path is not None}
    with one_line_errors(f"--dataset_name {name}"):
        splits = _load_data_set(name, cache_dir)
    if "train" not in splits:
        raise UserError(f"--dataset_name {name}: has no split train, but {list_names(list(splits))}")
    return {
        part: Source(Path(name if part == "train" else f"{name} ({part})"), splits[part])
        for part in ("train", "validation", "test")
        if part in splits
    }


def open_file(path: Path, cache_dir: Path | None = None) -> Source:
    """Load a file. All columns of a CSV are texts."""
    check_exists(path)
    builder = BUILDERS.get(path.suffix.lower(), "csv")
    with one_line_errors(str(path)):
        splits, hashes = _load_files(builder, cache_dir, data_files=glob.escape(str(path.absolute())))
    return Source(path, splits["train"], hashes[0] if builder == "csv" else None)


def _load_data_set(name: str, cache_dir: Path | None) -> datasets.DatasetDict:
    """Load all splits of a data set, from a folder, or from the Hub or the cache of `datasets`."""
    base, _, config = name.rstrip("/").rpartition("/")
    for folder, of_folder in ((name, None), (base, config)):
        if os.path.isdir(folder):
            # `datasets` names a data set after its folder, and `.` has no name.
            return _load_files(os.path.abspath(folder), cache_dir, name=of_folder)[0]
    of_hub = (base, config) if name.count("/") > 1 else (name, None)
    return datasets.load_dataset(*of_hub, cache_dir=cache_dir and str(cache_dir / "datasets"))


def _load_files(path: str, cache_dir: Path | None, **options: Any) -> tuple[datasets.DatasetDict, list[str]]:
    """Load a folder, or files with a builder of `datasets`. Return all splits, and the SHA-256 of each file."""
    # Otherwise, `datasets` would tell the Hub that its builder is in use, and wait for 3 seconds without a connection.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    with tempfile.TemporaryDirectory() as temporary:
        builder = datasets.load_dataset_builder(path, cache_dir=temporary, **options)
        found: Mapping[Any, list[str]] = builder.config.data_files or {}
        files = [Path(file) for of_split in found.values() for file in of_split]
        hashes = [_hash_file(file) for file in files]
        # `datasets` recognizes a file by its path and time, which are the same for other content after `cp -p`.
        folder = temporary if cache_dir is None else str(cache_dir / "datasets" / hash_json(hashes)[:32])
        load = partial(datasets.load_dataset, path, cache_dir=folder, keep_in_memory=cache_dir is None, **options)
        is_csv = builder.name == "csv"
        return _load_csv(load, files[0], builder.config.pd_read_csv_kwargs) if is_csv else load(), hashes


def _load_csv(load: Callable[..., Any], first: Path, arguments: Mapping[str, Any]) -> datasets.DatasetDict:
    """Load CSV files in one of the encodings, as texts: pandas would read 007 as 7, and NA as missing.

    Args:
        first: the file whose header has the names of all columns.
        arguments: of `pandas.read_csv`, such as the separator of a .tsv file.
    """
    # Without an index, a row with too many fields is an error. One with too few ends with empty fields.
    for encoding in ENCODINGS:
        options: dict[str, Any] = {"na_filter": False, "index_col": False, "encoding": encoding}
        try:
            names = pd.read_csv(first, **{**arguments, **options, "nrows": 0, "chunksize": None}).columns
            features = datasets.Features(dict.fromkeys(names, datasets.Value("large_string")))
            splits: datasets.DatasetDict = load(features=features, **options)
            return splits
        except Exception as error:
            if not isinstance(error.__cause__ or error, UnicodeDecodeError):
                raise
    raise ValueError("is neither UTF-8 nor GB18030; save it as UTF-8")


@contextmanager
def one_line_errors(name: str) -> Iterator[None]:
    """Turn whatever is raised inside the block, where `datasets` is quiet, into a `UserError` of one line."""
    datasets.disable_progress_bars()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # pandas has dropped fields that are too many
            yield
    except UserError:
        raise
    except Exception as error:  # the errors of `datasets`, pandas, Arrow and json have no common class
        lines = [line for line in str(error.__cause__ or error).splitlines() if line.strip()]
        text = shorten(lines[0] if lines else type(error).__name__, 200)
        has_no_rows = "corresponds to no data" in text or text == StopIteration.__name__
        raise UserError(f"{name}: {'has no rows' if has_no_rows else text}") from error
    finally:
        logging.disable(logging.NOTSET)


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_json(content: object) -> str:
    """Return the SHA-256 of the JSON of a value."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
