"""Load reviews with the library `datasets`: a CSV, JSON Lines or Parquet file, a folder of them, or a Hub data set.

`datasets` converts what it reads once, piece by piece, into an Arrow file in the cache, which all processes of a node
map: the reviews may be larger than the memory.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import json
import logging
import os
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pandas as pd
import pooch
from charset_normalizer.constant import FREQUENCIES

from ..common.errors import UserError, list_names, shorten
from ..common.files import check_exists
from ..settings import Settings

BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # everything else is a CSV
# Chinese text in GB18030 is hardly ever valid UTF-8, but many texts in UTF-8 are valid GB18030.
ENCODINGS = ("utf-8-sig", "gb18030")
FREQUENT = frozenset(FREQUENCIES["Chinese"])  # about a third of the characters of Chinese texts


@dataclass(frozen=True)
class Source:
    """The rows of one part."""

    path: Path  # the file or data set, for messages
    table: datasets.Dataset
    sha256: str | None = None  # of the bytes of a CSV whose encoding follows from them; None for anything else
    encoding: str | None = None  # of a CSV
    may_lack_labels: bool = False  # for published test rows whose labels are secret, as those of GLUE


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
        return {part: open_file(Path(path), cache_dir, settings.encoding) for part, path in files.items() if path}
    with one_line_errors(f"--dataset_name {name}"):
        base, _, config = name.rstrip("/").rpartition("/")
        if os.path.isdir(name):
            # `datasets` names a data set after its folder, and `.` has no name.
            splits, encoding, _ = _load_files(os.path.abspath(name), cache_dir, settings.encoding)
        elif os.path.isdir(base):
            splits, encoding, _ = _load_files(os.path.abspath(base), cache_dir, settings.encoding, name=config)
        else:
            of_hub = (base, config) if "/" in base else (name, None)
            splits, encoding = datasets.load_dataset(*of_hub, cache_dir=cache_dir and str(cache_dir / "datasets")), None
    if "train" not in splits:
        raise UserError(f"--dataset_name {name}: has no split train, but {list_names(list(splits))}")
    return {
        part: Source(
            Path(name if part == "train" else f"{name} ({part})"), splits[part], None, encoding, part == "test"
        )
        for part in ("train", "validation", "test")
        if part in splits
    }


def open_file(path: Path, cache_dir: Path | None = None, encoding: str | None = None) -> Source:
    """Load a file. All columns of a CSV are texts; by default, its encoding is recognized."""
    check_exists(path)
    kind = BUILDERS.get(path.suffix.lower(), "csv")
    with one_line_errors(str(path)):
        splits, encoding, hashes = _load_files(kind, cache_dir, encoding, data_files=glob.escape(str(path.absolute())))
    return Source(path, splits["train"], hashes[0] if encoding in ENCODINGS else None, encoding)


def _load_files(
    path: str, cache_dir: Path | None, encoding: str | None, **options: Any
) -> tuple[datasets.DatasetDict, str | None, list[str]]:
    """Load a folder, or files with a builder of `datasets`; with CSVs' encoding, and the SHA-256 of each file."""
    # Otherwise, `datasets` would tell the Hub that its builder is in use, and wait for 3 seconds without a connection.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    with tempfile.TemporaryDirectory() as temporary:
        builder = datasets.load_dataset_builder(path, cache_dir=temporary, **options)
        found: Mapping[Any, list[str]] = builder.config.data_files or {}
        files = [Path(file) for of_split in found.values() for file in of_split]
        hashes = [pooch.file_hash(file) for file in files]
        # `datasets` recognizes a file by its path and time, which are the same for other content after `cp -p`.
        folder = temporary if cache_dir is None else str(cache_dir / "datasets" / hash_json(hashes)[:32])
        load = partial(datasets.load_dataset, path, cache_dir=folder, keep_in_memory=cache_dir is None, **options)
        if builder.name != "csv":
            splits = load()
            for file in files:
                if file.suffix == ".json" and (content := file.read_bytes()).lstrip().startswith(b"["):
                    json.dumps(json.loads(content), ensure_ascii=False).encode()  # pandas drops half a surrogate pair
            return splits, None, hashes
        # Without an index, a row with too many fields is an error. One with too few ends with empty fields.
        arguments = builder.config.pd_read_csv_kwargs | {"na_filter": False, "index_col": False}
        for candidate in (encoding,) if encoding else ENCODINGS:
            try:
                splits = _load_csv(load, files, {**arguments, "encoding": candidate})
            except Exception as error:
                if not isinstance(error.__cause__ or error, UnicodeDecodeError):
                    raise
            else:
                if encoding or candidate != "gb18030" or all(map(_is_chinese, splits.values())):
                    return splits, candidate, hashes
    wrong = encoding or "UTF-8, nor Chinese in GB18030"
    raise ValueError(f"is not {wrong}: save it as UTF-8, or name its encoding with --encoding")


def _load_csv(load: Callable[..., Any], files: list[Path], options: dict[str, Any]) -> datasets.DatasetDict:
    """Load CSV files as texts: pandas would read 007 as 7, and NA as missing. All have the columns of the first."""
    names = _header(files[0], options)
    if names[0].startswith("sep="):  # Excel's line that names the separator
        options |= {"sep": names[0][4:5] or ",", "skiprows": 1}
    elif len(names) == 1:
        options["sep"] = max(",;\t|", key=lambda mark: len(_header(files[0], options | {"sep": mark})))
    features = datasets.Features(dict.fromkeys(_header(files[0], options), datasets.Value("large_string")))
    splits: datasets.DatasetDict = load(features=features, **options)
    for file in files if options["quoting"] == csv.QUOTE_MINIMAL else ():
        _check_quotes(file, options)
    return splits


def _header(path: Path, options: Mapping[str, Any]) -> list[str]:
    return list(pd.read_csv(path, **{**options, "nrows": 0, "chunksize": None}).columns)


def _is_chinese(split: datasets.Dataset) -> bool:
    """Tell whether texts read as GB18030 are Chinese: many texts in other encodings are also valid GB18030."""
    rows: Any = split[:: max(1, len(split) // 1_000)]
    letters = [c for column in rows.values() for text in column for c in text or "" if c.isalpha() and not c.isascii()]
    return len(letters) <= 20 * sum(c in FREQUENT for c in letters)


def _check_quotes(path: Path, options: Mapping[str, Any]) -> None:
    """Raise ValueError if text follows a closing quote. pandas goes on up to the next quote, and so may join rows."""
    csv.field_size_limit(2**31 - 1)  # reviews may be longer than the default
    with fsspec.open(str(path), "rt", encoding=options["encoding"], compression="infer") as file:
        reader = csv.reader(file, delimiter=options["sep"], strict=True)
        try:
            deque(reader, maxlen=0)
        except csv.Error as error:
            raise ValueError(f"{path.name}: line {reader.line_num}, or a quote before it: {error}") from None


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


def hash_json(content: object) -> str:
    """Return the SHA-256 of the JSON of a value."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
