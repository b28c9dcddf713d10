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
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd

from ..common.errors import UserError, list_names, shorten
from ..common.files import check_exists

BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # everything else is a CSV
# Chinese text in GB18030 is hardly ever valid UTF-8, but many texts in UTF-8 are valid GB18030.
ENCODINGS = ("utf-8-sig", "gb18030")
MOST_BRACKETS = 500  # open at once in a line of JSON: at some more, Arrow's parser crashes the process
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"')


@dataclass(frozen=True)
class HubDataset:
    """A data set on the Hugging Face Hub: `NAME` or `NAME/CONFIG`, or a folder of one."""

    name: str


# One file; the files of published parts, by part: "train" and "validation", "test", or both; or a data set.
Files = Mapping[str, Path] | HubDataset


@dataclass(frozen=True)
class Source:
    """The rows of one part."""

    path: Path  # the file or data set, for messages
    table: datasets.Dataset
    sha256: str | None = None  # of the bytes of a CSV file; None for anything else


def files_of(settings: Mapping[str, Any]) -> Files:
    """Return the files that settings name.

    Args:
        settings: with the `csv` that is read, which may be a default. Those of older runs lack the other names.
    """
    if settings.get("dataset_name") is not None:
        return HubDataset(settings["dataset_name"])
    parts = {"train": "csv", "validation": "validation_file", "test": "test_file"}
    return {part: Path(settings[name]) for part, name in parts.items() if settings.get(name) is not None}


def open_sources(files: Files, cache_dir: Path | None = None) -> dict[str, Source]:
    """Load the rows of all parts, in the order training, validation and test rows.

    Args:
        cache_dir: keeps what `datasets` has read. By default, it is in memory.

    Raises:
        UserError: There is no such file or data set, it cannot be read, or it has no rows or no training rows.
    """
    if not isinstance(files, HubDataset):
        return {part: open_file(path, cache_dir) for part, path in files.items()}
    with _one_line_errors(f"--dataset_name {files.name}"):
        splits = _load_data_set(files.name, cache_dir)
    if "train" not in splits:
        raise UserError(f"--dataset_name {files.name}: has no split train, but {list_names(list(splits))}")
    return {
        part: Source(Path(files.name if part == "train" else f"{files.name} ({part})"), splits[part])
        for part in ("train", "validation", "test")
        if part in splits
    }


def open_file(path: Path, cache_dir: Path | None = None) -> Source:
    """Load a file. All columns of a CSV are texts."""
    check_exists(path)
    builder = BUILDERS.get(path.suffix.lower(), "csv")
    with _one_line_errors(str(path)):
        sha256, splits = _load_local(builder, cache_dir, data_files=glob.escape(str(path.absolute())))
    return Source(path, splits["train"], sha256 if builder == "csv" else None)


# --- datasets --------------------------------------------------------------------------------------------------------


def _load_data_set(name: str, cache_dir: Path | None) -> datasets.DatasetDict:
    """Load all splits of a data set, from the Hub or a folder, or from the cache of `datasets`."""
    base, _, config = name.rstrip("/").rpartition("/")
    for folder, of_folder in ((name, None), (base, config)):
        if os.path.isdir(folder):
            # `datasets` names a data set after its folder, and `.` has no name.
            return _load_local(os.path.abspath(folder), cache_dir, name=of_folder)[1]
    if name.startswith((".", "~", "/")):
        raise ValueError("there is no such folder (~ is not expanded here)")
    # A name on the Hub is mostly owner/name, but it may be name/config as well.
    candidates = [(name, None)] if name.count("/") < 2 else []
    problems = []
    for path, of_path in [*candidates, *([(base, config)] if base else [])]:
        try:
            return _load_from_hub(path, of_path, cache_dir)
        except Exception as problem:  # the errors of `datasets` have no common class
            problems.append(problem)
    raise problems[0]


def _load_from_hub(path: str, config: str | None, cache_dir: Path | None) -> datasets.DatasetDict:
    folder = None if cache_dir is None else cache_dir / "datasets"
    splits = _load(path, folder, name=config)
    table = next(iter(splits.values()))
    if table.info.builder_name == "csv":
        splits = _load(path, folder, name=config, **_as_texts(table.column_names))
    return splits


def _load_local(path: str, cache_dir: Path | None, **options: Any) -> tuple[str, datasets.DatasetDict]:
    """Load a folder, or files with a builder of `datasets`. Return the SHA-256 of the files, and all splits."""
    with tempfile.TemporaryDirectory() as temporary:
        builder = datasets.load_dataset_builder(path, cache_dir=temporary, **options)
    found: Mapping[Any, list[str]] = builder.config.data_files or {}
    files = [Path(file) for of_split in found.values() for file in of_split]
    sha256 = _hash_files(files)
    # `datasets` recognizes a file by its path and time, which are the same for other content after `cp -p`.
    folder = None if cache_dir is None else cache_dir / "datasets" / sha256[:32]
    load = partial(_load, path, folder, **options)
    try:
        if builder.name == "json":
            for file in files:
                _check_nesting(file)
        splits = _load_csv(load, files[0], builder.config.pd_read_csv_kwargs) if builder.name == "csv" else load()
    except Exception as error:
        problem = error.__cause__ or error
        if folder is not None and isinstance(problem, OSError):  # the files themselves have been read before
            raise UserError(f"--cache_dir {cache_dir}: cannot be written: {problem.strerror or problem}") from error
        raise
    if _hash_files(files) != sha256:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise ValueError("has changed while it was read; start again")
    return sha256, splits


def _load_csv(load: Callable[..., Any], first: Path, arguments: Mapping[str, Any]) -> datasets.DatasetDict:
    """Load CSV files in one of the encodings.

    Args:
        first: the file whose header has the names of all columns.
        arguments: of `pandas.read_csv`, such as the separator of a .tsv file.
    """
    for encoding in ENCODINGS:
        header = {**arguments, "encoding": encoding, "index_col": False, "nrows": 0, "chunksize": None}
        try:
            splits: datasets.DatasetDict = load(encoding=encoding, **_as_texts(pd.read_csv(first, **header).columns))
            return splits
        except Exception as error:
            if not isinstance(error.__cause__ or error, UnicodeDecodeError):
                raise
    raise ValueError("is neither UTF-8 nor GB18030; save it as UTF-8")


def _as_texts(names: Iterable[str]) -> dict[str, Any]:
    """Return options for CSV columns as they are in the file: pandas would read 007 as 7, and NA as missing."""
    features = datasets.Features(dict.fromkeys(names, datasets.Value("large_string")))
    # Without an index, a row with too many fields is an error. One with too few ends with empty fields.
    return {"features": features, "na_filter": False, "index_col": False}


def _load(path: str, folder: Path | None, **options: Any) -> datasets.DatasetDict:
    with tempfile.TemporaryDirectory() as temporary:
        return datasets.load_dataset(path, cache_dir=str(folder or temporary), keep_in_memory=folder is None, **options)


@contextmanager
def _one_line_errors(name: str) -> Iterator[None]:
    """Turn whatever is raised inside the block, where `datasets` is quiet, into a `UserError` of one line."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    datasets.disable_progress_bars()  # also of the tokenizing that follows
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # pandas has dropped fields that are too many
            yield
    except UserError:
        raise
    except Exception as error:  # the errors of `datasets`, pandas, Arrow and json have no common class
        lines = [line for line in str(error.__cause__ or error).splitlines() if line.strip()]
        text = shorten(lines[0] if lines else type(error).__name__, 200)
        raise UserError(f"{name}: {'has no rows' if 'corresponds to no data' in text else text}") from error
    finally:
        logging.disable(disabled)


# --- files -----------------------------------------------------------------------------------------------------------


def _hash_files(files: Sequence[Path]) -> str:
    """Return the SHA-256 of a file, or of the hashes of several files."""
    hashes = []
    for path in files:
        if not path.stat().st_size:
            raise UserError(f"{path}: is empty; it needs rows")
        with path.open("rb") as file:
            hashes.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashes[0] if len(hashes) == 1 else hash_json(hashes)


def hash_json(content: object) -> str:
    """Return the SHA-256 of the JSON of a value."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _check_nesting(path: Path) -> None:
    """Reject JSON that is nested so deeply that Arrow's parser would crash the process."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.count(b"[") + line.count(b"{") > MOST_BRACKETS:
                brackets = np.frombuffer(_STRING.sub(b"", line), np.uint8)
                steps = np.isin(brackets, list(b"[{")).astype(int) - np.isin(brackets, list(b"]}"))
                if steps.cumsum().max(initial=0) > MOST_BRACKETS:
                    raise UserError(f"{path}: line {number}: is nested too deeply")
