"""Read a CSV of labeled reviews into a `ReviewTable`, strictly checked and cleaned.

This is the only module that opens the data file; `app.data.csv_checks` parses it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ..common.errors import UserError
from .csv_checks import decode, list_names, parse_columns, quote_name, read_bytes

# Every split fingerprint covers this text. Keep it word for word unless the rules themselves change.
CLEANING_RULES = (
    "rows without a review (empty or only whitespace), then rows without a label (the same), are dropped; "
    "reviews are kept to the letter; labels are stripped, and 1.0 and +1 are the class 1"
)

_MAX_CLASSES = 1000
_ALWAYS_ALLOWED_CLASSES = 20  # above this, a column with a distinct value in most rows is not taken for labels
_N_ROWS_SHOWN = 5

# At most 18 digits, so that the value fits into int64. 007 is treated as a code, not as a number.
_INTEGER = re.compile(r"([+-]?(?:0|[1-9][0-9]{0,17}))(?:\.0*)?")


@dataclass(frozen=True, eq=False)
class ReviewTable:
    """The usable reviews of one CSV file.

    All row numbers are 0-based data rows, as in the index of `pandas.read_csv(path)`.

    Attributes:
        path: The file.
        sha256: Hash of the file's bytes.
        rows_read: Number of data rows in the file.
        dropped: Reason ("no review" or "no label") to the dropped data rows in file order. Contains only reasons that
            occur.
        class_names: The label value, as text, of each class id.
        rows: Data row of each kept review, int64 (n,).
        texts: The reviews, str (n,) with a RangeIndex. The only copy of the text that a process holds.
        labels: Class ids, int64 (n,).
    """

    path: Path
    sha256: str
    rows_read: int
    dropped: dict[str, list[int]]
    class_names: tuple[str, ...]
    rows: np.ndarray
    texts: pd.Series
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.texts)


def read_reviews(path: str | Path, text_column: str = "review", label_column: str = "label") -> ReviewTable:
    """Read, check and clean a comma-separated CSV file with a header, in UTF-8 (with or without BOM) or GB18030.

    Only an empty field is missing: "NA", "null" and "nan" are reviews or labels like any other. Classes are sorted
    numerically if every label is an integer, otherwise by code point. Further columns are ignored.

    Raises:
        UserError: The file cannot be read, is malformed (see `app.data.csv_checks`) or has no usable row, or its
            labels have a single value or too many values to be classes. The message names the file and, if possible,
            line and column.
    """
    path = Path(path)
    if text_column == label_column:
        raise UserError(f"{path}: --text_column and --label_column both name {text_column!r}; they must differ")
    try:
        content = read_bytes(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    columns = parse_columns(path, decode(path, content), text_column=text_column, label_column=label_column)
    texts, values = (pd.Series(column, dtype=str) for column in columns)

    no_review, no_label = _is_missing(texts), _is_missing(values)
    reasons = {"no review": no_review, "no label": no_label & ~no_review}
    dropped = {reason: np.flatnonzero(mask).tolist() for reason, mask in reasons.items() if mask.any()}
    rows = np.flatnonzero(~(no_review | no_label)).astype(np.int64)
    if not len(rows):
        counts = ", ".join(f"{len(rows_dropped):,} with {reason}" for reason, rows_dropped in dropped.items())
        raise UserError(f"{path}: no row has both a review ({text_column!r}) and a label ({label_column!r}): {counts}")
    class_names, labels = _encode_labels(path, label_column, values.iloc[rows])
    return ReviewTable(
        path=path,
        sha256=hashlib.sha256(content).hexdigest(),
        rows_read=len(texts),
        dropped=dropped,
        class_names=class_names,
        rows=rows,
        texts=texts.iloc[rows].reset_index(drop=True),
        labels=labels,
    )


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


def _is_missing(column: pd.Series) -> np.ndarray:
    return ((column == "") | column.str.isspace()).to_numpy(bool)


def _encode_labels(path: Path, label_column: str, values: pd.Series) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the sorted class names and the class id of each value, int64."""
    values = values.str.strip()
    distinct: list[str] = values.unique().tolist()
    if len(distinct) > _MAX_CLASSES or (len(distinct) > _ALWAYS_ALLOWED_CLASSES and 2 * len(distinct) > len(values)):
        raise UserError(
            f"{path}: column {label_column!r} has {len(distinct):,} distinct values in {len(values):,} rows "
            f"({list_names(distinct[:3])}, …): too many to be classes; choose another column with --label_column"
        )
    class_of_value = {value: _class_name(value) for value in distinct}
    names = sorted(set(class_of_value.values()))
    if all(_INTEGER.fullmatch(name) for name in names):
        names.sort(key=int)
    if len(names) == 1:
        raise UserError(
            f"{path}: column {label_column!r} has only one class, {quote_name(names[0])}; at least two are required"
        )
    ids = {value: names.index(name) for value, name in class_of_value.items()}
    return tuple(names), values.map(ids).to_numpy(np.int64)


def _class_name(value: str) -> str:
    """Normalize integers: missing labels turn an integer column into floats, so 1.0 and 1 are the same class."""
    integer = _INTEGER.fullmatch(value)
    return str(int(integer[1])) if integer else value
