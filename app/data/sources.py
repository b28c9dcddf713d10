"""Read reviews: a CSV, JSON Lines or Parquet file, a folder of them, or a data set on the Hub.

Each file is converted once, piece by piece, into an Arrow file in the cache, which all processes of a node map: the
reviews may be larger than the memory. `datasets` finds the files of a folder and its splits, but it would read some
texts of JSON files as dates.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pandas as pd
import pooch
import pyarrow as pa
import pyarrow.parquet as pq
from charset_normalizer.constant import FREQUENCIES

from ..common.errors import UserError, list_names, shorten
from ..common.files import cached_file, check_exists
from ..settings import Settings

BUILDERS = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".parquet": "parquet"}  # everything else is a CSV
# Chinese text in GB18030 is hardly ever valid UTF-8, but many texts in UTF-8 are valid GB18030.
ENCODINGS = {"csv": ("utf-8-sig", "gb18030"), "json": ("utf-8-sig",), "parquet": (None,)}
FREQUENT = frozenset(FREQUENCIES["Chinese"])  # about a third of the characters of Chinese texts
CHUNK = 10_000  # rows of a JSON file that are converted at once
FILE_VERSION = 1  # part of the name of an Arrow file: increase it if the rows change


@dataclass(frozen=True)
class Source:
    """The rows of one part."""

    path: Path  # the file or data set, for messages
    table: datasets.Dataset
    sha256: str | None = None  # of the bytes of a CSV whose encoding follows from them; None for anything else
    notes: str = ""  # for the start of a run: the encoding of a CSV or JSON file, and what is not read
    may_lack_labels: bool = False  # for published test rows whose labels are secret, as those of GLUE


def open_sources(settings: Settings, cache_dir: Path | None = None) -> dict[str, Source]:
    """Load the rows of all parts, in the order training, validation and test rows.

    Args:
        settings: They name files, or a data set: a folder, or `OWNER/NAME` on the Hugging Face Hub, with `/CONFIG` if
            it has several.
        cache_dir: keeps what has been read. By default, it is in memory.

    Raises:
        UserError: There is no such file or data set, it cannot be read, or it has no rows or no training rows.
    """
    name = settings.dataset_name
    if name is None:
        files = {"train": settings.csv_path, "validation": settings.validation_file, "test": settings.test_file}
        return {part: open_file(Path(path), settings, cache_dir) for part, path in files.items() if path}
    left_out: list[str] = []
    with one_line_errors(f"--dataset_name {name}"):
        base, _, config = name.rstrip("/").rpartition("/")
        if os.path.isdir(name) or os.path.isdir(base):
            # `datasets` names a data set after its folder, and `.` has no name.
            folder = Path(os.path.abspath(name if os.path.isdir(name) else base))
            options = {} if os.path.isdir(name) else {"name": config}
            splits, encoding, hashes = _load_files(str(folder), settings, cache_dir, **options)
            read = {os.path.realpath(file) for file in hashes}
            others = [file for file in folder.rglob("*") if {".csv", ".tsv", *BUILDERS} & {*file.suffixes}]
            names = (os.path.relpath(file, folder) for file in others if os.path.realpath(file) not in read)
            left_out = sorted(name for name in names if not name.startswith("."))
        elif settings.encoding:
            raise ValueError("--encoding is for CSV and JSON files")
        else:
            of_hub = (base, config) if "/" in base else (name, None)
            splits = datasets.load_dataset(*of_hub, cache_dir=cache_dir and str(cache_dir / "datasets"))
            encoding = None
    if "train" not in splits:
        raise UserError(f"--dataset_name {name}: has no split train, but {list_names([*map(str, splits)])}")
    left_out += [f"split {split}" for split in splits if split not in ("train", "validation", "test")]
    notes = ", ".join(filter(None, (encoding, f"without {list_names(left_out)}" if left_out else None)))
    return {
        part: Source(Path(name if part == "train" else f"{name} ({part})"), splits[part], None, notes, part == "test")
        for part in ("train", "validation", "test")
        if part in splits
    }


def open_file(path: Path, settings: Settings, cache_dir: Path | None = None) -> Source:
    """Load a file. All columns of a CSV are texts; by default, its encoding is recognized."""
    check_exists(path)
    kind = BUILDERS.get(Path(path.name.lower().removesuffix(".gz")).suffix, "csv")
    with one_line_errors(str(path)):
        splits, encoding, hashes = _load_files(kind, settings, cache_dir, data_files=glob.escape(str(path.absolute())))
    (sha256,) = hashes.values()
    is_recognized = kind == "csv" and encoding in ENCODINGS["csv"]
    return Source(path, splits["train"], sha256 if is_recognized else None, encoding or "")


def _load_files(
    path: str, settings: Settings, cache_dir: Path | None, **options: Any
) -> tuple[Mapping[Any, datasets.Dataset], str | None, dict[str, str]]:
    """Load a folder, or files with a builder of `datasets`; with the encoding, and the SHA-256 of each file."""
    # Otherwise, `datasets` would tell the Hub that its builder is in use, and wait for 3 seconds without a connection.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    with tempfile.TemporaryDirectory() as temporary:
        builder = datasets.load_dataset_builder(path, cache_dir=temporary, **options)
        kind: str = builder.name
        parts: Mapping[Any, list[str]] = builder.config.data_files or {}
        hashes = {file: pooch.file_hash(file) for files in parts.values() for file in files}
        readers: Any = {"csv": _read_csv, "json": _read_json, "parquet": _read_parquet}
        if kind not in readers:
            raise ValueError(f"has {kind} files: save them as CSV, JSON Lines or Parquet")
        if kind == "parquet" and settings.encoding:
            raise ValueError("--encoding is for CSV and JSON files")
        for encoding in (settings.encoding,) if settings.encoding else ENCODINGS[kind]:
            how = builder.config.pd_read_csv_kwargs if kind == "csv" else {}
            how, splits = how | {"encoding": encoding, "columns": (settings.text_column, settings.label_column)}, {}
            try:
                for part, files in parts.items():
                    key = hash_json([FILE_VERSION, kind, repr(how), [hashes[file] for file in files]])
                    rows = (cache_dir or Path(temporary)) / f"rows-{key[:32]}.arrow"
                    cached_file(rows, partial(_write, readers[kind](files, **how)))
                    splits[part] = datasets.Dataset.from_file(str(rows), in_memory=cache_dir is None)
            except UnicodeDecodeError:
                continue
            if settings.encoding or encoding != "gb18030" or all(map(_is_chinese, splits.values())):
                return splits, encoding, hashes
    wrong = settings.encoding or ("UTF-8, nor Chinese in GB18030" if kind == "csv" else "UTF-8")
    raise ValueError(f"is not {wrong}: save it as UTF-8, or name its encoding with --encoding, such as utf-16 or cp949")


def _write(batches: Iterator[pa.RecordBatch], target: Path) -> None:
    """Write the rows, which all have the columns of the first ones, into an Arrow file."""
    batches = (batch for batch in batches if batch.num_rows)
    first = next(batches, None)
    if first is None:
        raise ValueError("has no rows")
    with pa.ipc.new_stream(str(target), first.schema) as writer:
        for batch in chain([first], batches):
            writer.write_batch(batch)


def _read_parquet(files: list[str], columns: tuple[str, str], encoding: None) -> Iterator[pa.RecordBatch]:
    """Read Parquet files, which have types."""
    first, names = None, []
    for file in files:
        own = pq.read_schema(file)
        types = [f.with_type(f.type.value_type) if pa.types.is_dictionary(f.type) else f for f in own]
        schema = pa.schema(types, own.metadata)
        features = datasets.Features.from_arrow_schema(schema)
        names.append([getattr(features.get(name), "names", None) for name in columns])
        if names[-1] != names[0]:
            raise ValueError(
                f"{Path(file).name}: its ClassLabel has other names, or another order, than the first file's"
            )
        first = first or schema
        for batch in pq.ParquetFile(file).iter_batches():
            yield batch.select(first.names).cast(first)


def _read_json(files: list[str], columns: tuple[str, str], encoding: str) -> Iterator[pa.RecordBatch]:
    """Read the columns as texts. Others, whose values may be anything, are empty."""
    names = dict.fromkeys(name for file in files for row in _json_rows(file, encoding) for name in row)
    for file in files:
        rows = enumerate(_json_rows(file, encoding))
        while chunk := [*islice(rows, CHUNK)]:
            texts = {name: pa.nulls(len(chunk), pa.large_string()) for name in names}
            for name in {*names} & {*columns}:
                place = f"{Path(file).name}: row {{}}, column {name!r}"
                values = [to_text(row.get(name), place.format(i)) for i, row in chunk]
                texts[name] = pa.array(values, pa.large_string())
            yield pa.RecordBatch.from_pydict(texts)


def to_text(value: object, place: str) -> str | None:
    """Return a value as text, or None if it is missing, as NaN is."""
    if value is None or value != value:
        return None
    if not isinstance(value, str | int | float):
        raise ValueError(f"{place}: is neither a text nor a number")
    try:
        return str(value).encode().decode()
    except UnicodeEncodeError:
        raise ValueError(f"{place}: has half of a surrogate pair") from None


def _json_rows(file: str, encoding: str) -> Iterator[dict[str, object]]:
    """Read the objects of JSON Lines, or of an array."""
    with fsspec.open(file, "rt", encoding=encoding, compression="infer") as stream:
        lines = (line for line in stream if not line.isspace())
        first = next(lines, "[]")
        is_array = first.lstrip().startswith("[")
        rows: Iterable[Any] = json.loads(first + stream.read()) if is_array else chain([first], lines)
        for i, row in enumerate(rows):
            try:
                values = row if is_array else json.loads(row)
            except json.JSONDecodeError as error:
                raise ValueError(f"{Path(file).name}: row {i}: {error}") from None
            if not isinstance(values, dict):
                raise ValueError(f"{Path(file).name}: row {i}: is not an object with the names of columns")
            yield values


def _read_csv(files: list[str], columns: tuple[str, str], **options: Any) -> Iterator[pa.RecordBatch]:
    """Read all columns as texts: pandas would read 007 as 7, and NA as missing."""
    schema = None
    for file in files:
        # Without an index, a row with too few fields ends with empty ones.
        own = options | {"na_filter": False, "index_col": False, "dtype": str}
        names = _header(file, own)
        if "\0" in names[0]:  # as half the bytes of ASCII in UTF-16
            raise ValueError("looks like UTF-16: save it as UTF-8, or name its encoding with --encoding utf-16")
        if names[0].startswith("sep="):  # Excel's line that names the separator
            own |= {"sep": names[0][4:5] or ",", "skiprows": 1}
        elif len(names) == 1:
            own["sep"] = max(",;\t|", key=lambda mark: len(_header(file, own | {"sep": mark})))
        names = _header(file, own)
        schema = schema or pa.schema(dict.fromkeys(names, pa.large_string()))
        _check_rows(file, len(names), own)
        with pd.read_csv(file, **own) as reader:
            for frame in reader:
                yield pa.RecordBatch.from_pandas(frame, schema, preserve_index=False)


def _header(path: str, options: Mapping[str, Any]) -> list[str]:
    return list(pd.read_csv(path, **{**options, "nrows": 0, "chunksize": None}).columns)


def _is_chinese(split: datasets.Dataset) -> bool:
    """Tell whether texts read as GB18030 are Chinese: many texts in other encodings are also valid GB18030."""
    rows: Any = split[:: max(1, len(split) // 1_000)]
    letters = [c for column in rows.values() for text in column for c in text or "" if c.isalpha() and not c.isascii()]
    return len(letters) <= 20 * sum(c in FREQUENT for c in letters)


def _check_rows(path: str, width: int, options: Mapping[str, Any]) -> None:
    """Raise ValueError if a row has too many fields, which pandas may drop, or text after a closing quote.

    pandas goes on up to the next quote, and so may join rows.
    """
    csv.field_size_limit(2**31 - 1)  # reviews may be longer than the default
    with fsspec.open(path, "rt", encoding=options["encoding"], compression="infer", newline="") as file:
        reader = csv.reader(file, delimiter=options["sep"], quoting=options["quoting"], strict=True)
        place = f"{Path(path).name}: line"
        try:
            for row in islice(reader, options.get("skiprows") or 0, None):
                if len(row) > width:
                    raise ValueError(f"{place} {reader.line_num} has {len(row)} fields, but the header has {width}")
        except csv.Error as error:
            raise ValueError(f"{place} {reader.line_num}, or a quote before it: {error}") from None


@contextmanager
def one_line_errors(name: str) -> Iterator[None]:
    """Turn whatever is raised inside the block, where `datasets` is quiet, into a `UserError` of one line."""
    datasets.disable_progress_bars()
    logging.disable(logging.CRITICAL)
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the errors of `datasets`, pandas, Arrow and json have no common class
        lines = [line for line in str(error.__cause__ or error).splitlines() if line.strip()]
        text = shorten(lines[0] if lines else type(error).__name__, 200)
        raise UserError(f"{name}: {text}") from error
    finally:
        logging.disable(logging.NOTSET)


def hash_json(content: object) -> str:
    """Return the SHA-256 of the JSON of a value."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
