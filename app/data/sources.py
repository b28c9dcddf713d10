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
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pandas as pd
import pooch
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from fsspec.utils import infer_compression

from ..common.errors import UserError, list_names, shorten
from ..common.files import cached_file, check_exists
from ..settings import Settings
from .encoding import ENCODINGS, recognize_encoding

BUILDERS = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".parquet": "parquet"}  # everything else is a CSV
SAVED = (datasets.config.DATASETDICT_JSON_FILENAME, datasets.config.DATASET_STATE_JSON_FILENAME)  # by save_to_disk
PARTS = ("train", "validation", "test")
JSON_ROWS = "a JSON file has one object per line, or an array of objects"


@dataclass(frozen=True)
class Source:
    """The rows of one part."""

    path: Path  # the file or data set, for messages
    table: datasets.Dataset
    sha256: str | None = None  # of the bytes of a CSV whose encoding follows from them; None for anything else
    notes: tuple[str, ...] = ()  # for the start of a run: the encoding (may be empty), and which files are read
    may_lack_labels: bool = False  # for published test rows whose labels are secret, as those of GLUE


def open_sources(settings: Settings, cache_dir: Path | None = None) -> dict[str, Source]:
    """Load the rows of all parts, in the order training, validation and test rows.

    The settings name files, or a data set: a folder, or `OWNER/NAME` on the Hugging Face Hub, with `/CONFIG` if it has
    several. What `datasets` converts is kept in `cache_dir`; by default, it is in memory.

    Raises:
        UserError: There is no such file or data set, it cannot be read, or it has no rows or no training rows.
    """
    name = settings.dataset_name
    if name is None:
        paths = {"train": settings.csv_path, "validation": settings.validation_file, "test": settings.test_file}
        return {part: open_file(Path(path), cache_dir, settings.encoding) for part, path in paths.items() if path}
    encoding, files, unread = "", dict[str, dict[str, str]](), list[str]()
    with one_line_errors(f"--dataset_name {name}"):
        base, _, config = name.rstrip("/").rpartition("/")
        folder, options = (name, {}) if os.path.isdir(name) else (base, {"name": config})
        is_saved = any(os.path.isfile(f"{name}/{file}") for file in SAVED)
        if os.path.isdir(folder) and not is_saved:
            folder = os.path.realpath(folder)  # `datasets` names a data set after its folder, and `.` has no name
            if glob.escape(os.path.expandvars(folder)) != folder or "\n" in folder:
                raise ValueError("rename the folder: `datasets` would read its name as a pattern, or a variable in it")
            splits, encoding, files = _load_files(folder, cache_dir, settings.encoding, **options)
            rest = {*glob.glob(f"{glob.escape(folder)}/**", recursive=True)}.difference(*files.values())
            unread = sorted(os.path.relpath(f, folder) for f in rest if os.path.isfile(f) and not f.endswith(".md"))
        elif settings.encoding:
            raise ValueError("--encoding is for CSV and JSON files")
        elif is_saved:  # beside it may be the caches of `map`, and files of an earlier call of `save_to_disk`
            saved = datasets.load_from_disk(name)
            splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
        else:
            of_hub = (base, config) if "/" in base else (name, None)
            splits = datasets.load_dataset(*of_hub, cache_dir=cache_dir and str(cache_dir / "datasets"))
    if "train" not in splits:
        raise UserError(f"--dataset_name {name}: has no split train, but {list_names(list(splits))}")
    unread += [f"split {split}" for split in splits if split not in PARTS]
    merged = (
        f"{part} rows from {len(of_part)} files: {list_names([os.path.relpath(file, folder) for file in of_part])}"
        for part, of_part in files.items()
        if part in PARTS and len(of_part) > 1
    )
    notes = (encoding, *merged, f"without {list_names(unread)}" if unread else "")
    return {
        part: Source(Path(name if part == "train" else f"{name} ({part})"), splits[part], None, notes, part == "test")
        for part in PARTS
        if part in splits
    }


def open_file(path: Path, cache_dir: Path | None = None, encoding: str | None = None) -> Source:
    """Load a file. All columns of a CSV are texts; by default, its encoding is recognized."""
    check_exists(path)
    name = Path(path.name.lower())
    kind = BUILDERS.get((name.with_suffix("") if infer_compression(str(name)) else name).suffix, "csv")
    with one_line_errors(str(path)):
        data_files = glob.escape(str(path.absolute()))
        if os.path.expandvars(data_files) != data_files:
            raise ValueError("rename the file: `datasets` would replace the variable in its path")
        splits, found, files = _load_files(kind, cache_dir, encoding, data_files=data_files)
    sha256 = next(iter(files["train"].values())) if kind == "csv" and not encoding else None
    return Source(path, splits["train"], sha256, (found,) if found else ())


def _load_files(
    path: str, cache_dir: Path | None, encoding: str | None, **options: Any
) -> tuple[Mapping[str, datasets.Dataset], str, dict[str, dict[str, str]]]:
    """Load a folder, or files with a builder of `datasets`.

    Returns:
        The splits, a note on their encoding, and the SHA-256 of each file of each split.
    """
    # Otherwise, `datasets` would tell the Hub that its builder is in use, and wait for 3 seconds without a connection.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    with tempfile.TemporaryDirectory() as temporary:
        builder: Any = datasets.load_dataset_builder(path, cache_dir=temporary, **options)
        # A README.md may name the classes that a CSV or JSON has as numbers.
        features = builder.info.features or {}
        classes = {name: value for name, value in features.items() if isinstance(value, datasets.ClassLabel)}
        names = [(i, name) for label in classes.values() for i, name in enumerate(label.names)]
        if any(not isinstance(name, str) for _, name in names):
            raise ValueError("README.md names classes by other values than texts, such as `no`: quote them there")
        if builder.name in ENCODINGS and any(name.isdecimal() and name != str(i) for i, name in names):
            raise ValueError("README.md names classes by numbers, which could be their positions: rename them there")
        files = [file for split, of in builder.config.data_files.items() if split in PARTS for file in of]
        if twice := [os.path.basename(file) for file, n in Counter(files).items() if n > 1]:
            raise ValueError(f"{list_names(twice)} would be read for several splits: rename what has both in its path")
        by_part = {part: {f: pooch.file_hash(f) for f in of} for part, of in builder.config.data_files.items()}
        hashes = {file: sha256 for of_part in by_part.values() for file, sha256 in of_part.items()}
        if builder.name in ENCODINGS:
            encoding = encoding or (builder.config.encoding if builder.name == "csv" else None)  # of a README.md
            encoding = options["encoding"] = recognize_encoding(hashes, encoding, ENCODINGS[builder.name])
        elif encoding:
            raise ValueError("--encoding is for CSV and JSON files")
        if builder.name == "csv":
            options |= _csv_options([*hashes], builder.config.pd_read_csv_kwargs | {"encoding": encoding})
            options["features"].update(classes)
        # `datasets` recognizes a file by its path and time, which are the same for other content after `cp -p`.
        key = hash_json([builder.name, *hashes.values(), str({**options, "data_files": None})])
        folder = Path(cache_dir or temporary, "datasets", key[:32])
        if not (folder / "checked").exists():
            _check_files(builder.name, hashes, options)
        cached_file(folder / "checked", Path.touch)
        place = {"cache_dir": str(folder), "keep_in_memory": not cache_dir}
        if encoding and builder.name == "json":
            parts = builder.config.data_files.items()
            splits = {part: _load_json(files, encoding, classes, split=part, **place) for part, files in parts}
        else:
            # A README.md may have the sizes of other splits.
            splits = datasets.load_dataset(path, verification_mode="no_checks", **place, **options)
        note = encoding or ""
        if builder.name == "csv" and (n := sum(map(_count_line_breaks, splits.values()))):
            note += f", {n:,} row{'s' * (n > 1)} with line breaks within quotes"
        return splits, note, by_part


def _count_line_breaks(table: datasets.Dataset) -> int:
    """Count the rows of a CSV with line breaks. Without quoting, quotes of two rows may enclose those between them."""
    columns = (column for column in table.data.columns if pa.types.is_large_string(column.type))
    return int(pc.sum(reduce(pc.or_, (pc.match_substring(column, "\n") for column in columns))).as_py() or 0)


def _load_json(
    files: list[str], encoding: str, classes: Mapping[str, datasets.ClassLabel], **options: Any
) -> datasets.Dataset:
    """Load JSON as texts. `datasets` would infer types from pieces of the files, and so change dates, 01 and true."""
    features = dict[str, Any]()
    for name, value in chain.from_iterable(row.items() for row in _json_rows(files, encoding)):
        if isinstance(value, list | dict):
            features[name] = datasets.Json()  # no text, which a column of reviews or labels must be
        features.setdefault(name, datasets.Value("large_string"))
    if not features:
        raise ValueError(f"has no rows ({JSON_ROWS}: in pandas, orient='records')")
    features = datasets.Features({**features, **classes})
    rows = partial(_json_rows, files, encoding, only_values=True)
    return datasets.Dataset.from_generator(rows, features, **options)


def _json_rows(files: list[str], encoding: str, only_values: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the rows of JSON Lines files, or of files with an array; with `only_values`, lists and objects are None."""
    decode = partial(json.loads, parse_constant=lambda _: None)  # NaN is missing
    for file in files:
        with fsspec.open(file, "rt", encoding=encoding, compression="infer") as stream:
            is_array = "[" in stream.read(100).partition("{")[0]
            stream.seek(0)
            place = Path(file).name
            try:
                for i, row in enumerate(decode(stream.read()) if is_array else filter(str.strip, stream)):
                    place = f"{Path(file).name}: row {i}"
                    values = dict(**(row if is_array else decode(row)))
                    json.dumps(values, ensure_ascii=False).encode()  # raises an error for half of a surrogate pair
                    yield {n: None if only_values and isinstance(v, list | dict) else v for n, v in values.items()}
            except (json.JSONDecodeError, UnicodeEncodeError, RecursionError, TypeError) as error:
                raise ValueError(f"{place}: {error} ({JSON_ROWS})") from None


def _csv_options(files: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """Return how to read CSV files as texts: pandas would read 007 as 7, and NA as missing."""
    # Without an index, a row with too few fields ends with empty ones.
    options |= {"na_filter": False, "index_col": False}
    names = _header(files[0], options)
    if names[0].startswith("sep="):  # Excel's line that names the separator
        options |= {"sep": names[0][4:5] or ",", "skiprows": 1}
    elif len(names) == 1:
        options["sep"] = max(",;\t|", key=lambda mark: len(_header(files[0], options | {"sep": mark})))
    names = _header(files[0], options)
    return options | {"features": datasets.Features(dict.fromkeys(names, datasets.Value("large_string")))}


def _header(path: str, options: Mapping[str, Any]) -> list[str]:
    return list(pd.read_csv(path, **{**options, "nrows": 0, "chunksize": None}).columns)


def _check_files(kind: str, files: Collection[str], options: Mapping[str, Any]) -> None:
    """Raise an error if `datasets` would read anything but what is in the files."""
    if kind == "parquet":
        schemas = [pq.read_schema(file) for file in files]
        pa.unify_schemas(schemas, promote_options="permissive")  # `datasets` would convert true to 1, and "007" to 7
        features = [sorted(datasets.Features.from_arrow_schema(schema).items()) for schema in schemas]
        if len({str([(name, getattr(feature, "names", "")) for name, feature in one]) for one in features}) > 1:
            raise ValueError("its files have different columns, or a ClassLabel with other names or in another order")
    csv.field_size_limit(2**31 - 1)  # reviews may be longer than the default
    header: list[str] = []  # of the first file
    for file in files if kind == "csv" else ():
        with fsspec.open(file, "rt", encoding=options["encoding"], compression="infer", newline="") as stream:
            names_of_dialect = ("quoting", "quotechar", "escapechar", "doublequote", "skipinitialspace")
            dialect = {name: options[name] for name in names_of_dialect}
            reader = csv.reader(stream, delimiter=options["sep"], strict=True, **dialect)
            names: list[str] = options.get("names") or []  # of a README.md, for files without a header
            try:  # pandas may drop fields that are too many, and continue after a closing quote
                for row in islice(reader, options["skiprows"], None):
                    if len(row) > len(names or row):
                        raise csv.Error(f"has {len(row)} fields, but the header has {len(names)}")
                    plain = [field.strip("\ufeff ").casefold() for field in row]
                    if row and plain == names:
                        raise csv.Error("repeats the header: remove it")  # several files, joined with `cat`
                    if row and not names:
                        names, header = plain, header or row
                        if sorted(row) != sorted(header):
                            other = list_names(header)
                            differ = f"has the columns {list_names(row)}, but another file {other}"
                            raise ValueError(f"{Path(file).name} {differ}: move one, such as test rows without labels")
                if not names:
                    raise csv.Error("has no header")
            except csv.Error as error:
                problem = str(error).replace("\t", "tab")
                hint = (
                    ": write a quote within quotes twice, no space beside a separator" if "expected" in problem else ""
                )
                place = f"{Path(file).name}: line {reader.line_num}, or a quote before it"
                raise ValueError(f"{place}: {problem}{hint}") from None


@contextmanager
def one_line_errors(name: str) -> Iterator[None]:
    """Turn whatever is raised inside the block, where `datasets` is quiet, into a `UserError` of one line."""
    datasets.disable_progress_bars()
    logging.disable(logging.CRITICAL)
    try:
        yield
    except UserError:  # of --cache_dir
        raise
    except Exception as error:  # the errors of `datasets`, pandas, Arrow and json have no common class
        text = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
        text = shorten(text.removeprefix(f"{os.path.basename(name)}: "), 200)
        has_no_rows = any(part in text for part in ("corresponds to no data", "at least one example", "BatchSize"))
        raise UserError(f"{name}: {'has no rows' if has_no_rows else text}") from error
    finally:
        logging.disable(logging.NOTSET)


def hash_json(content: object) -> str:
    """Return the SHA-256 of the JSON of a value."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
