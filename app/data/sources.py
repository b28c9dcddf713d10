"""Where reviews come from: a CSV, which `app.data.csv_checks` parses, or a format that the library `datasets` reads."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.errors import UserError
from .csv_checks import (
    check_columns,
    check_file,
    hash_file,
    hash_json,
    list_names,
    quote_name,
    read_columns,
    read_header,
    readable,
)
from .hf_datasets import HubDataset, find_json_problem, load_file, load_splits

if TYPE_CHECKING:
    from datasets import Dataset

BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
UNSUPPORTED = (".xlsx", ".xls", ".ods", ".arrow", ".feather", ".orc", ".avro")
CHUNK = 1_000  # rows that are in memory at once


@dataclass(frozen=True)
class CsvSource:
    """One or more CSV files, which are read in order. Messages about all of them name `path`."""

    path: Path
    files: tuple[Path, ...]

    def names(self) -> list[str]:
        return read_header(self.files[0])

    def sha256(self, text_column: str, label_column: str | None) -> str:
        """Return the hash of the file's bytes; of several files, the hash of their hashes."""
        hashes = [hash_file(file) for file in self.files]
        return hashes[0] if len(hashes) == 1 else hash_json(hashes)

    def rows(self, text_column: str, label_column: str | None) -> Iterator[tuple[str, str]]:
        """Yield text and label of each data row; without a label column, all labels are empty."""
        for file in self.files:
            yield from read_columns(file, text_column=text_column, label_column=label_column)


@dataclass(frozen=True)
class DatasetSource:
    """A table of the library `datasets`, with the file's path for messages."""

    path: Path
    table: Dataset

    def names(self) -> list[str]:
        return list(self.table.column_names)

    def sha256(self, text_column: str, label_column: str | None) -> str:
        """Return the hash of the CSV that `Dataset.to_csv` would write from these columns, in the order of the table.

        So the same rows have the same hash, and the same split fingerprint, in every format.
        """
        columns = [name for name in self.names() if name in (text_column, label_column)]
        digest, buffer = hashlib.sha256(), io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(columns)
        for text, label in self.rows(text_column, label_column):
            writer.writerow([text if name == text_column else label for name in columns])
            if buffer.tell() > 1 << 20:
                digest.update(buffer.getvalue().encode())
                buffer.seek(0)
                buffer.truncate()
        digest.update(buffer.getvalue().encode())
        return digest.hexdigest()

    def rows(self, text_column: str, label_column: str | None) -> Iterator[tuple[str, str]]:
        """Yield text and label of each row; a missing value, or a missing label column, is an empty text.

        Raises:
            UserError: a column is missing, there are no rows, or a value is neither a text nor a number.
        """
        check_columns(self.path, self.names(), text_column=text_column, label_column=label_column)
        if not len(self.table):
            raise UserError(f"{self.path}: has columns ({list_names(self.names())}) but no rows")
        columns = [text_column] if label_column is None else [text_column, label_column]
        row = 0
        for batch in self._batches(columns):
            for values in zip(*(batch[name] for name in columns), strict=True):
                texts = [self._to_text(value, row, name) for value, name in zip(values, columns, strict=True)]
                yield texts[0], texts[1] if label_column is not None else ""
                row += 1

    def _batches(self, columns: list[str]) -> Iterator[dict[str, list[Any]]]:
        try:
            yield from self.table.select_columns(columns).iter(CHUNK)
        except UnicodeDecodeError:  # Arrow does not check the encoding when it reads a file
            problem = find_json_problem(self.path) if BUILDERS.get(self.path.suffix.lower()) == "json" else None
            raise UserError(f"{self.path}: {problem or 'contains text that is not valid UTF-8'}") from None

    def _to_text(self, value: Any, row: int, column: str) -> str:
        if value is None or value != value:  # NaN, which writers other than pandas leave for a missing value
            return ""
        if not isinstance(value, str | int | float):
            kind = type(value).__name__
            raise UserError(
                f"{self.path}: row {row}, column {quote_name(column)}: is of type {kind}, not a text or number"
            )
        return str(value)


Source = CsvSource | DatasetSource


# One file or data set; or the files of published parts, by part: "train" and "validation", "test", or both.
Files = Mapping[str, Path] | HubDataset


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
    """Open the files of all parts, in the order training, validation and test rows.

    Raises:
        UserError: As for `open_source`; or the data set does not exist, cannot be loaded or has no training rows.
    """
    if not isinstance(files, HubDataset):
        return {part: open_source(path, cache_dir) for part, path in files.items()}
    sources: dict[str, Source] = {}
    splits = load_splits(files.name, cache_dir)
    for part in ("train", "validation", "test"):
        if (split := splits.get(part)) is None:
            continue
        path = Path(files.name if part == "train" else f"{files.name} ({part})")
        if isinstance(split, tuple):
            sources[part] = CsvSource(split[0] if len(split) == 1 else path, split)
        else:
            sources[part] = DatasetSource(path, split)
    return sources


def combine_hashes(hashes: Mapping[str, str], sources: Mapping[str, Source]) -> str:
    """Return the hash of all parts, which is that of the file if there is only one.

    Raises:
        UserError: Two parts have the same content.
    """
    part_of: dict[str, str] = {}
    for part, sha256 in hashes.items():
        if (other := part_of.setdefault(sha256, part)) != part:
            raise UserError(
                f"{sources[part].path}: has the same rows as {sources[other].path}: give each part a file of its own"
            )
    return hashes["train"] if len(hashes) == 1 else hash_json(hashes)


def open_source(path: Path, cache_dir: Path | None = None) -> Source:
    """Open a file: .jsonl, .json and .parquet by the library `datasets`, everything else as a CSV.

    Args:
        cache_dir: keeps what `datasets` has read, so that the processes of a node share it. By default, it is in
            memory.

    Raises:
        UserError: There is no such file, it cannot be read, or it is in a format that is not supported.
    """
    suffix = path.suffix.lower()
    with readable(path):
        check_file(path)
    if suffix in UNSUPPORTED:
        raise UserError(f"{path}: {suffix} files cannot be read; give a .csv, .jsonl, .json or .parquet file")
    if suffix not in BUILDERS:
        return CsvSource(path, (path,))
    return DatasetSource(path, load_file(path, BUILDERS[suffix], cache_dir))
