"""Clean reviews into a `ReviewTable`: drop rows without a review or a label, and number the classes.

`app.data.sources` reads the files. Columns are processed as a whole by Arrow: a list of all reviews in Python could be
larger than the memory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ..common.errors import UserError, list_names
from ..settings import split_label_names
from .classes import find_class, form_classes, original_names, rename_classes
from .sources import Files, Source, hash_json, open_sources

Indices = NDArray[np.int64]
MAX_SAMPLE = 50_000  # rows that a vocabulary or a baseline is learned from: it takes memory for all of them
CHUNK = 10_000  # rows that are hashed at once

# Every split fingerprint covers this text. Keep it word for word unless the rules themselves change.
CLEANING_RULES = (
    "rows without a review (empty or only whitespace), then rows without a label (the same), are dropped; "
    "reviews are kept to the letter; labels are stripped, and 1.0 and +1 are the class 1"
)

_MOST_SLICES = 10_000  # of the mapped reviews: more would be slow


@dataclass(frozen=True, eq=False)
class ReviewTable:
    """The usable reviews of one file, or of the files of published parts: the training rows, then validation and test.

    Row numbers are data rows of their part, counted from 0: the index of `pandas.read_csv(path)` if it is one file.
    """

    path: Path  # the file, or that of the training rows
    sha256: str  # of the bytes of a CSV; of anything else, of the CSV that pandas would write of the two columns
    rows_read: int
    dropped: dict[str, list[int]]  # data rows by reason, "no review" or "no label", if there are any
    class_names: tuple[str, ...]  # the label, as text, of each class id
    rows: np.ndarray  # the data row of each kept review, int64 (n,)
    # str (n,) in Arrow arrays, which may be in a mapped file. Take slices of it, or `texts_of`: a list of all reviews
    # could be larger than the memory.
    texts: pd.Series
    labels: np.ndarray  # class ids, int64 (n,); -1 for a row without a label, which only a table to predict has
    parts: Mapping[str, int] = field(default_factory=dict)  # their numbers of reviews; empty if there is one file

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def part_rows(self) -> dict[str, Indices]:
        """The positions of each published part."""
        ends = np.cumsum([0, *self.parts.values()])
        return {name: np.arange(ends[i], ends[i + 1], dtype=np.int64) for i, name in enumerate(self.parts)}

    def texts_of(self, rows: Indices) -> pd.Series:
        """Return the reviews of some positions, which are sorted."""
        # With a mask, Arrow copies these reviews alone. With positions, it would first join all chunks in memory.
        start, stop = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
        mask = np.zeros(stop - start, dtype=bool)
        mask[rows - start] = True
        return self.texts.iloc[start:stop][mask]

    def sample_texts(self, rows: Indices) -> pd.Series:
        """Return the reviews of `sample_rows`, to learn a vocabulary and embeddings from."""
        return self.texts_of(sample_rows(rows))


def read_reviews(
    path: str | Path | Files,
    text_column: str = "review",
    label_column: str = "label",
    *,
    label_names: str | None = None,
    cache_dir: Path | None = None,
) -> ReviewTable:
    """Read and clean reviews. Arguments and errors are those of `open_sources` and `clean`.

    Args:
        path: A file, or as `files_of` returns it.
    """
    files = {"train": Path(path)} if isinstance(path, str | Path) else path
    return clean(open_sources(files, cache_dir), (text_column, label_column), label_names=label_names)


def clean(
    sources: Mapping[str, Source],
    columns: tuple[str, str | None],
    *,
    class_names: Sequence[str] | None = None,
    label_names: str | None = None,
) -> ReviewTable:
    """Return the usable reviews of all parts.

    In a CSV, only an empty field is missing: "NA", "null" and "nan" are reviews or labels like any other. Classes are
    sorted numerically if every label is an integer, otherwise by code point. Further columns are ignored.

    Args:
        columns: Names of the text and label columns; None for no labels, only with `class_names`.
        class_names: The classes of a trained model, whose predictions need no labels. By default, the classes are the
            distinct labels, and rows without a label are dropped.
        label_names: Other names for the classes, such as `0=negative,1=positive`.

    Raises:
        UserError: There is no usable row, or the labels have a single value or too many values to be classes.
    """
    path = sources["train"].path
    if columns[0] == columns[1]:
        raise UserError(f"{path}: --text_column and --label_column both name {columns[0]!r}; they must differ")
    parts = {part: _clean_part(source, columns, class_names is not None) for part, source in sources.items()}
    names, train = split_label_names(label_names or ""), parts["train"]
    if class_names is None:
        classes = form_classes(path, str(columns[1]), train.distinct_labels, n_rows=len(train.rows))
    else:  # the file has the original names
        classes = original_names(class_names, names)
    origin = str(path) if class_names is None else "the model"
    dropped = {
        reason if part == "train" else f"{reason} ({part} file)": rows
        for part, cleaned in parts.items()
        for reason, rows in cleaned.dropped.items()
    }
    hashes = {part: source.sha256 or _hash_rows(source, columns) for part, source in sources.items()}
    texts = pa.chunked_array([chunk for cleaned in parts.values() for chunk in cleaned.texts], pa.large_string())
    labels = [_class_ids(cleaned, classes, path=sources[part].path, origin=origin) for part, cleaned in parts.items()]
    return ReviewTable(
        path=path,
        sha256=hashes["train"] if len(hashes) == 1 else hash_json(hashes),
        rows_read=sum(len(source.table) for source in sources.values()),
        dropped=dropped,
        class_names=rename_classes(classes, names, origin=origin),
        rows=np.concatenate([cleaned.rows for cleaned in parts.values()]),
        texts=pd.Series(pd.arrays.ArrowExtensionArray(texts)),
        labels=np.concatenate(labels),
        parts={part: len(cleaned.rows) for part, cleaned in parts.items()} if len(parts) > 1 else {},
    )


def sample_rows(rows: Indices) -> Indices:
    """Return rows at equal distances, no more than `MAX_SAMPLE`; all rows if there are no more."""
    return rows[:: max(1, math.ceil(len(rows) / MAX_SAMPLE))]


def describe_dropped(table: ReviewTable) -> list[str]:
    """Return one line per reason for dropping rows."""
    return [
        f"{table.path}: dropped {len(rows):,} of {table.rows_read:,} rows with {reason}: {list_rows(rows)}"
        for reason, rows in table.dropped.items()
    ]


def list_rows(rows: Sequence[int] | np.ndarray) -> str:
    """Return the first of some data rows for a message."""
    numbers = ", ".join(map(str, rows[:5])) + (", …" if len(rows) > 5 else "")
    return f"row{'s' * (len(rows) != 1)} {numbers} (data rows, counted from 0 below the header, as in predictions.csv)"


# --- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """The usable rows of a part, and what has been dropped.

    Attributes:
        distinct_labels: the labels, without the whitespace around them.
        codes: the index in `distinct_labels` of the label of each row.
    """

    rows: Indices
    dropped: dict[str, list[int]]
    texts: list[pa.Array]
    distinct_labels: list[str]
    codes: Indices


def _clean_part(source: Source, columns: tuple[str, str | None], to_predict: bool) -> _Part:
    for flag, column in zip(("--text_column", "--label_column"), columns, strict=True):
        if column is not None and column not in source.table.column_names:
            names = list_names(source.table.column_names)
            raise UserError(f"{source.path}: no column {column!r}; the file has {names} (choose a column with {flag})")
    texts = _column(source, columns[0])
    labels = _column(source, columns[1]) if columns[1] else pa.chunked_array([[""] * len(texts)], pa.large_string())
    no_review = _is_missing(texts)
    no_label = _is_missing(labels) & ~no_review if not to_predict else np.zeros_like(no_review)
    found = {"no review": no_review, "no label": no_label}
    dropped = {reason: np.flatnonzero(missing).tolist() for reason, missing in found.items() if missing.any()}
    kept = ~(no_review | no_label)
    if not kept.any():
        counts = ", ".join(f"{len(rows):,} with {reason}" for reason, rows in dropped.items())
        label = "" if to_predict else f" and a label ({columns[1]!r})"
        raise UserError(
            f"{source.path}: no row has {'' if to_predict else 'both '}a review ({columns[0]!r}){label}: {counts}"
        )
    labels = pc.utf8_trim_whitespace(labels.filter(pa.array(kept)).fill_null("")).combine_chunks()
    codes = labels.dictionary_encode()
    return _Part(
        rows=np.flatnonzero(kept),
        dropped=dropped,
        texts=_select(texts, kept),
        distinct_labels=codes.dictionary.to_pylist(),
        codes=codes.indices.to_numpy(),
    )


def _class_ids(part: _Part, classes: Sequence[str], *, path: Path, origin: str) -> Indices:
    """Return the class id of each row; -1 for an empty label."""
    ids = [find_class(label, classes) for label in part.distinct_labels]
    if None in ids:
        code = ids.index(None)
        row, label = part.rows[np.argmax(part.codes == code)], list_names(part.distinct_labels[code : code + 1])
        raise UserError(
            f"{path}: row {row}: label {label} is not a class of {origin}, which has {list_names(classes)}; "
            "leave it out, or choose another column with --label_column"
        )
    return np.array(ids, dtype=np.int64)[part.codes]


def _column(source: Source, name: str) -> pa.ChunkedArray:
    """Return a column as texts."""
    column = source.table.data[name]
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        values = source.table[name][:]
        if odd := [row for row, value in enumerate(values) if not isinstance(value, str | int | float | None)]:
            raise UserError(f"{source.path}: row {odd[0]}, column {name!r}: is neither a text nor a number")
        # NaN is what writers other than pandas leave for a missing value.
        texts = [None if value is None or value != value else str(value) for value in values]
        return pa.chunked_array([texts], pa.large_string())
    try:
        column.validate(full=True)  # Arrow does not check the encoding of JSON and Parquet files when it reads them
    except pa.ArrowInvalid as problem:
        raise UserError(f"{source.path}: column {name!r}: {problem}") from None
    if source.table.info.builder_name == "csv" and pc.any(pc.match_substring(column, "\0")).as_py():
        raise UserError(f"{source.path}: contains NUL bytes: it is a binary file, or damaged; save it as UTF-8")
    return column.cast(pa.large_string())


def _is_missing(texts: pa.ChunkedArray) -> NDArray[np.bool_]:
    """Tell which texts are missing, empty or only whitespace."""
    blank = pc.or_(pc.equal(pc.binary_length(texts), 0), pc.utf8_is_space(texts))
    missing: NDArray[np.bool_] = pc.fill_null(blank, True).to_numpy()
    return missing


def _select(texts: pa.ChunkedArray, keep: NDArray[np.bool_]) -> list[pa.Array]:
    """Return the kept rows. Slices remain in the mapped file, which all processes share; `filter` copies."""
    starts, ends = np.flatnonzero(np.diff(keep, prepend=False, append=False)).reshape(-1, 2).T
    if len(starts) > _MOST_SLICES:
        chunks: list[pa.Array] = texts.filter(pa.array(keep)).chunks
        return chunks
    return [chunk for start, end in zip(starts, ends, strict=True) for chunk in texts.slice(start, end - start).chunks]


def _hash_rows(source: Source, columns: tuple[str, str | None]) -> str:
    """Return the hash of the CSV that pandas would write: the same rows have the same hash in every format."""
    names = [name for name in source.table.column_names if name in columns]
    table = pa.table({name: _column(source, name) for name in names})
    digest = hashlib.sha256()
    for start in range(0, len(table), CHUNK):
        rows = table.slice(start, CHUNK).to_pandas()
        digest.update(rows.to_csv(index=False, header=start == 0, lineterminator="\n").encode())
    return digest.hexdigest()
