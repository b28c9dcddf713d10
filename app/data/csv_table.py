"""Read labeled reviews into a `ReviewTable`, strictly checked and cleaned.

`app.data.sources` reads the records of each format. They are processed one by one: a file may be larger than
the memory.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from ..common.cache import is_intact, write_intact
from ..common.errors import UserError
from ..settings import split_label_names
from .classes import find_classes, form_classes
from .csv_checks import list_names, quote_name
from .sources import CsvSource, Files, Source, combine_hashes, open_sources

Indices = NDArray[np.int64]
MAX_SAMPLE = 50_000  # rows that a vocabulary or a baseline is learned from: it takes memory for all of them
FILE_VERSION = 1  # part of the cache key: increase it if the file's format changes

# Every split fingerprint covers this text. Keep it word for word unless the rules themselves change.
CLEANING_RULES = (
    "rows without a review (empty or only whitespace), then rows without a label (the same), are dropped; "
    "reviews are kept to the letter; labels are stripped, and 1.0 and +1 are the class 1"
)

_N_ROWS_SHOWN = 5


@dataclass(frozen=True, eq=False)
class ReviewTable:
    """The usable reviews of one file, or of the files of published parts: the training rows, then validation and test.

    All row numbers are 0-based data rows of their part: the index of `pandas.read_csv(path)` if it is one file. In a
    part of several files, they continue from one file to the next.

    Attributes:
        path: The file, or that of the training rows.
        sha256: Hash of the bytes of a CSV; of several CSV files, of their hashes; of other formats, of the CSV that
            `datasets` would write.
        rows_read: Number of data rows in the file.
        dropped: Reason ("no review" or "no label") to the dropped data rows in file order. Contains only reasons that
            occur.
        class_names: The label value, as text, of each class id.
        rows: Data row of each kept review, int64 (n,).
        texts: The reviews, str (n,) with a RangeIndex, in one Arrow array, which may be a mapped file. Take rows or
            slices of it: a list of all reviews could be larger than the memory.
        labels: Class ids, int64 (n,); -1 for a row without a label, which only a table to predict has.
        parts: Number of reviews of each published part, in order; empty if there is one file.
    """

    path: Path
    sha256: str
    rows_read: int
    dropped: dict[str, list[int]]
    class_names: tuple[str, ...]
    rows: np.ndarray
    texts: pd.Series
    labels: np.ndarray
    parts: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def part_rows(self) -> dict[str, Indices]:
        """The positions of each published part."""
        ends = np.cumsum([0, *self.parts.values()])
        return {name: np.arange(ends[i], ends[i + 1], dtype=np.int64) for i, name in enumerate(self.parts)}

    def sample_texts(self, rows: Indices) -> pd.Series:
        """Return the reviews of `sample_rows`, to learn a vocabulary and embeddings from."""
        return self.texts.iloc[sample_rows(rows)]


def read_reviews(
    path: str | Path | Files,
    text_column: str = "review",
    label_column: str | None = "label",
    *,
    class_names: Sequence[str] | None = None,
    label_names: str | None = None,
    cache_dir: Path | None = None,
) -> ReviewTable:
    """Read, check and clean a file: a comma-separated CSV with a header, in UTF-8 (with or without BOM) or GB18030; or,
    by suffix, JSON Lines or Parquet.

    Only an empty field is missing: "NA", "null" and "nan" are reviews or labels like any other. Classes are sorted
    numerically if every label is an integer, otherwise by code point. Further columns are ignored.

    Args:
        path: A file, or as `files_of` returns it.
        label_column: None only with `class_names`: the reviews have no labels.
        class_names: The classes of a trained model, whose predictions need no labels. By default, the classes are the
            distinct labels, and rows without a label are dropped.
        label_names: Other names for the classes, such as `0=negative,1=positive`.
        cache_dir: Keeps the result in an Arrow file. Calls with the same content map this file, so that the processes
            of a node share one copy of the reviews. By default, the reviews are in memory.

    Raises:
        UserError: The file cannot be read, is malformed (see `app.data.csv_checks`) or has no usable row, or its
            labels have a single value or too many values to be classes. The message names the file and, if possible,
            line and column. Or the cache folder cannot be read or written.
    """
    if isinstance(path, str | Path):
        path = {"train": Path(path)}
    sources = open_sources(path, cache_dir)
    path = sources["train"].path
    if text_column == label_column:
        raise UserError(f"{path}: --text_column and --label_column both name {text_column!r}; they must differ")
    columns, names = (text_column, label_column), split_label_names(label_names or "")
    hashes = {part: source.sha256(*columns) for part, source in sources.items()}
    sha256 = combine_hashes(hashes, sources)
    if class_names is not None:  # the file has the original ones
        class_names = original_names(class_names, names)
    if cache_dir is None:
        texts = io.BytesIO()
        rows = _parse(sources, columns, texts, hashes=hashes, class_names=class_names)
        return rename_classes(_to_table(path, sha256, rows.to_arrow(pa.py_buffer(texts.getbuffer()))), names)
    recipe = [FILE_VERSION, sha256, columns, CLEANING_RULES, *([] if class_names is None else [class_names])]
    key = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:32]
    file = cache_dir / f"rows-{key}.arrow"

    def write(staging: Path) -> None:
        # The reviews go to the disk while the file is read. Mapped, they become a column of the Arrow file.
        texts = staging.with_suffix(".txt")
        with texts.open("wb") as sink:
            rows = _parse(sources, columns, sink, hashes=hashes, class_names=class_names)
        with pa.memory_map(str(texts)) as mapped:
            table = rows.to_arrow(mapped.read_buffer())
            with staging.open("wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
                writer.write_table(table)

    if not is_intact(file, key):
        write_intact(file, key, write)
    try:
        table = _to_table(path, sha256, pa.ipc.open_stream(pa.memory_map(str(file))).read_all())
    except (OSError, pa.ArrowInvalid) as problem:
        raise UserError(f"--cache_dir {cache_dir}: cannot read {file.name} ({problem}); delete it") from None
    return rename_classes(table, names)


def original_names(class_names: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """Return the labels of classes that `rename_classes` may have renamed."""
    originals = {name: label for label, name in names.items()}
    return [originals.get(name, name) for name in class_names]


def rename_classes(table: ReviewTable, names: Mapping[str, str], origin: str | None = None) -> ReviewTable:
    """Return the table with other names for some classes.

    Raises:
        UserError: A label is not a class of `origin`, by default the file, or two classes get the same name.
    """
    if unknown := [label for label in names if label not in table.class_names]:
        raise UserError(
            f"--label_names: {quote_name(unknown[0])} is not a class of {origin or table.path}, which has "
            f"{list_names(list(table.class_names))}"
        )
    renamed = tuple(names.get(label, label) for label in table.class_names)
    if len(set(renamed)) < len(renamed):
        raise UserError(f"--label_names: two classes have the name {quote_name(max(renamed, key=renamed.count))}")
    return replace(table, class_names=renamed)


def sample_rows(rows: Indices) -> Indices:
    """Return rows at equal distances, no more than `MAX_SAMPLE`; all rows if there are no more."""
    return rows[:: max(1, math.ceil(len(rows) / MAX_SAMPLE))]


def describe_dropped(table: ReviewTable) -> list[str]:
    """Return one line per reason for dropping rows."""
    return [
        f"{table.path}: dropped {len(rows):,} of {table.rows_read:,} rows with {reason}: {_first_rows(rows)}"
        for reason, rows in table.dropped.items()
    ]


def list_rows(rows: Sequence[int] | np.ndarray) -> str:
    """Return the first of some data rows for a message, such as `rows 3, 8 (data rows, counted from 0 …)`."""
    return f"row{'s' * (len(rows) != 1)} {_first_rows(rows)}"


def _first_rows(rows: Sequence[int] | np.ndarray) -> str:
    numbers = ", ".join(map(str, rows[:_N_ROWS_SHOWN])) + (", …" if len(rows) > _N_ROWS_SHOWN else "")
    return f"{numbers} (data rows, counted from 0 below the header, as in predictions.csv)"


@dataclass(frozen=True)
class _Rows:
    """What is kept of a CSV file, without the reviews: `ends[i]` is where review i ends in their UTF-8 bytes."""

    facts: dict[str, Any]  # `rows_read`, `dropped` and `class_names` of the table
    row: array[int]
    label: Indices
    ends: array[int]

    def to_arrow(self, texts: pa.Buffer) -> pa.Table:
        """Return an Arrow table whose reviews are this buffer, which is not copied."""
        # One array, because taking rows of several arrays would copy all of them.
        offsets = np.concatenate([[0], self.ends]).astype(np.int64)
        reviews = pa.LargeStringArray.from_buffers(len(self.row), pa.py_buffer(offsets), texts)
        columns = {"row": np.asarray(self.row), "label": self.label, "review": reviews}
        return pa.table(columns).replace_schema_metadata({"facts": json.dumps(self.facts)})


def _to_table(path: Path, sha256: str, rows: pa.Table) -> ReviewTable:
    facts = json.loads(rows.schema.metadata[b"facts"])
    return ReviewTable(
        path=path,
        sha256=sha256,
        rows_read=facts["rows_read"],
        dropped=facts["dropped"],
        class_names=tuple(facts["class_names"]),
        rows=rows["row"].to_numpy(),
        texts=pd.Series(pd.arrays.ArrowExtensionArray(rows["review"])),
        labels=rows["label"].to_numpy(),
        parts=facts.get("parts", {}),
    )


def _parse(
    sources: Mapping[str, Source],
    columns: tuple[str, str | None],
    texts: BinaryIO,
    *,
    hashes: Mapping[str, str],
    class_names: Sequence[str] | None,
) -> _Rows:
    """Parse and clean the files row by row, and write the UTF-8 bytes of the kept reviews to `texts`."""
    kept, codes, ends = array("q"), array("q"), array("q")
    dropped: dict[str, list[int]] = {}
    n_read, end = 0, 0
    code_of: dict[str, int] = {}  # by label, without the whitespace around it
    parts: dict[str, int] = {}
    names = tuple(class_names or ())
    class_of_code: Indices = np.empty(0, dtype=np.int64)
    for part, source in sources.items():
        no_review: list[int] = []
        no_label: list[int] = []
        first_rows: dict[str, int] = {}  # of the labels that no earlier file has
        n_before = len(kept)
        for row, (text, label) in enumerate(source.rows(*columns)):  # the last one is counted below
            if not text or text.isspace():
                no_review.append(row)
            elif class_names is None and (not label or label.isspace()):
                no_label.append(row)
            else:
                end += texts.write(text.encode())
                ends.append(end)
                kept.append(row)
                code = code_of.setdefault(label.strip(), len(code_of))
                if code == len(class_of_code) + len(first_rows):
                    first_rows[label.strip()] = row
                codes.append(code)
        if isinstance(source, CsvSource) and source.sha256(*columns) != hashes[part]:
            raise UserError(f"{source.path}: has changed while it was read; start again")
        n_read += row + 1
        where = "" if part == "train" else f" ({part} file)"
        reasons = {"no review": no_review, "no label": no_label}
        found = {f"{reason}{where}": rows for reason, rows in reasons.items() if rows}
        parts[part] = len(kept) - n_before
        if not parts[part]:
            raise _no_rows(source.path, columns, found, to_predict=class_names is not None)
        dropped |= found
        if part != "train":  # the training rows have determined the classes
            ids = find_classes(source.path, first_rows, names, origin=str(sources["train"].path))
        elif class_names is None:
            names, ids = form_classes(source.path, str(columns[1]), list(code_of), n_rows=len(kept))
        else:
            ids = find_classes(source.path, first_rows, class_names)
        class_of_code = np.concatenate([class_of_code, ids])
    facts = {"rows_read": n_read, "dropped": dropped, "class_names": names}
    if len(sources) > 1:
        facts["parts"] = parts
    return _Rows(facts, kept, class_of_code[np.asarray(codes)], ends)


def _no_rows(
    path: Path, columns: tuple[str, str | None], dropped: Mapping[str, Sequence[int]], *, to_predict: bool
) -> UserError:
    if to_predict:
        return UserError(f"{path}: no row has a review ({columns[0]!r})")
    counts = ", ".join(f"{len(rows):,} with {reason}" for reason, rows in dropped.items())
    return UserError(f"{path}: no row has both a review ({columns[0]!r}) and a label ({columns[1]!r}): {counts}")
