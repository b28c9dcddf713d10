"""Clean reviews into a `ReviewTable`: drop rows without a review or a label, and number the classes.

`app.data.sources` reads the files. Columns are processed as a whole by Arrow: a list of all reviews in Python could be
larger than the memory.
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from datasets import ClassLabel, Json
from numpy.typing import NDArray

from ..common.errors import UserError, list_names, shorten
from ..setting_groups import split_label_names
from .sources import Source, hash_json, one_line_errors

Indices = NDArray[np.int64]
MAX_SAMPLE = 50_000  # rows that a vocabulary or a baseline is learned from: it takes memory for all of them
MAX_CHARACTERS = 4_000  # of such a row: learning a vocabulary takes time quadratic in the length of a run of characters

# Every split fingerprint covers this text. Keep it word for word unless the rules themselves change.
CLEANING_RULES = (
    "rows without a review (empty or only whitespace), then rows without a label (the same), are dropped; "
    "reviews are kept to the letter; labels are stripped, and 1.0 and +1 are the class 1"
)
CHUNK = 10_000  # rows that are hashed at once

# At most 18 digits, so that the value fits into int64. 007 is treated as a code, not as a number.
INTEGER = re.compile(r"([+-]?(?:0|[1-9][0-9]{0,17}))(?:\.0*)?")


@dataclass(frozen=True, eq=False)
class ReviewTable:
    """The usable reviews of one file, or of the files of published parts: the training rows, then validation and test.

    Row numbers are data rows of their part, counted from 0: the index of `pandas.read_csv(path)` if it is one file.
    """

    path: Path  # the file, or that of the training rows
    # Of the bytes of a --csv whose encoding was recognized; otherwise of the CSV that pandas would write of the two
    # columns. Of several parts, of their hashes.
    sha256: str
    rows_read: int
    dropped: dict[str, list[int]]  # data rows by reason, "no review" or "no label", if there are any
    class_names: tuple[str, ...]  # the label, as text, of each class id
    rows: np.ndarray  # the data row of each kept review, int64 (n,)
    # str (n,) in Arrow arrays, which may be in a mapped file. Take slices of it, or `texts_of`: a list of all reviews
    # could be larger than the memory.
    texts: pd.Series
    labels: np.ndarray  # class ids, int64 (n,); -1 for a row without a label, which only a table to predict has
    parts: Mapping[str, Indices] = field(default_factory=dict)  # the positions of each published part, if there are any
    notes: tuple[str, ...] = ()  # of all sources

    def __len__(self) -> int:
        return len(self.texts)

    def texts_of(self, rows: Indices) -> pd.Series:
        """Return the reviews of some positions, which are sorted."""
        # With a mask, Arrow copies these reviews alone. With positions, it would first join all chunks in memory.
        mask = np.zeros(len(self), dtype=bool)
        mask[rows] = True
        return self.texts[mask]

    def sample_texts(self, rows: Indices) -> pd.Series:
        """Return the beginnings of the reviews of `sample_rows`, to learn a vocabulary and embeddings from."""
        return self.texts_of(sample_rows(rows)).str.slice(stop=MAX_CHARACTERS)


def clean(
    sources: Mapping[str, Source],
    columns: tuple[str, str | None] = ("review", "label"),
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
        label_names: Other names for the classes, such as `0=negative,1=positive`. The files have the original ones.

    Raises:
        UserError: There is no column, no usable row or only one class.
    """
    path, notes = sources["train"].path, sources["train"].notes
    frames = {part: _read_columns(source, columns) for part, source in sources.items()}
    hashes = {part: source.sha256 or _hash_rows(frames[part]) for part, source in sources.items()}
    frame = pd.concat(frames)
    parts, rows = (frame.index.get_level_values(level).to_numpy() for level in (0, 1))
    texts = frame[columns[0]]
    labels = frame[columns[1]].fillna("").str.strip() if columns[1] else pd.Series("", frame.index)
    labels = labels.map({label: _class_name(label) for label in labels.unique()})
    names = split_label_names(label_names or "")
    unlabeled = [part for part in sources if labels[parts == part].eq("-1").all()]
    if "-1" not in {*names, *(class_names or labels[parts == "train"].unique())}:
        labels = labels.mask(np.isin(parts, unlabeled), "")
    no_review = (texts.eq("") | texts.str.isspace()).fillna(True).to_numpy(bool)
    no_label = labels.eq("").to_numpy(bool) & ~no_review & (class_names is None)
    kept = ~no_review & ~no_label
    dropped: dict[str, list[int]] = {}
    for part, source in sources.items():
        for reason, is_missing in (("no review", no_review), ("no label", no_label)):
            if of_part := rows[is_missing & (parts == part)].tolist():
                dropped[reason if part == "train" else f"{reason} ({part} file)"] = of_part
        if not kept[parts == part].any() and not (source.may_lack_labels and class_names is None):
            needed = "a review" if class_names else f"both a review ({columns[0]!r}) and a label ({columns[1]!r})"
            counts = ", ".join(f"{len(of_reason):,} with {reason}" for reason, of_reason in dropped.items())
            raise UserError(f"{source.path}: no row has {needed}: {counts}")
    labels, parts, rows = labels[kept], parts[kept], rows[kept]
    # Slices remain in the mapped file, which all processes share; a mask would copy.
    slices = np.ma.flatnotmasked_contiguous(np.ma.array(kept, mask=~kept))
    pieces = [texts.iloc[part] for part in slices] if len(slices) <= 10_000 else [texts[kept]]  # more would be slow
    texts = pd.concat(pieces, ignore_index=True)
    origin = "the model" if class_names else str(path)
    original = class_names or _classes_of(labels[parts == "train"], sources["train"], columns[1])
    if class_names is None or not {*names.values()} <= {*class_names}:  # otherwise, a run was trained with these names
        class_names = [names.get(name, name) for name in original]
        if not {*names} <= {*original} or len({*class_names}) < len(class_names):
            known = list_names(original)
            if names:
                raise UserError(f"--label_names: must give different names to classes of {origin}, which has {known}")
            raise UserError(f"{path}: two classes have the same name: {known}")
    codes, distinct = labels.factorize()
    class_ids = _class_ids(distinct, class_names, names)
    if None in class_ids:
        code = class_ids.index(None)
        first = int(np.argmax(codes == code))
        raise UserError(
            f"{sources[parts[first]].path}: row {rows[first]}: label {shorten(repr(distinct[code]))} is not a class of "
            f"{origin}, which has {list_names(original)}; leave it out, or use --label_names or --label_column"
        )
    return ReviewTable(
        path=path,
        sha256=hashes["train"] if len(hashes) == 1 else hash_json(hashes),
        rows_read=len(frame),
        dropped=dropped,
        class_names=tuple(class_names),
        rows=rows,
        texts=texts,
        labels=np.array(class_ids, dtype=np.int64)[codes],
        parts={part: np.flatnonzero(parts == part) for part in dict.fromkeys(parts)} if len(sources) > 1 else {},
        notes=(*notes, *(f"{part}: {note}" for part, s in sources.items() if s.notes != notes for note in s.notes)),
    )


def _read_columns(source: Source, columns: tuple[str, str | None]) -> pd.DataFrame:
    """Return the columns as texts in Arrow arrays, in the order of the file."""
    names = source.table.column_names
    for flag, name in zip(("--text_column", "--label_column"), columns, strict=True):
        if name is not None and name not in names:
            raise UserError(f"{source.path}: no column {name!r}; the file has {list_names(names)} (choose with {flag})")
        if f"{name}.1" in names:  # the name that pandas gives to another column of the same name
            raise UserError(f"{source.path}: has two columns {name!r}, or {name}.1 besides: rename or remove one")
    return pd.DataFrame({n: pd.arrays.ArrowExtensionArray(_texts(source, n)) for n in names if n in columns})


def _texts(source: Source, name: str) -> pa.ChunkedArray:
    column, feature = source.table.data[name], source.table.features[name]
    with one_line_errors(f"{source.path}: column {name!r}"):
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            column.validate(full=True)  # Arrow does not check the encoding of Parquet files when it reads them
            return column.cast(pa.large_string())
        if isinstance(feature, Json):  # `datasets` has it also for texts and numbers
            kinds = "lists, objects, or texts and numbers"
            raise ValueError(f"has {kinds}: each row needs one text (in pandas, orient='records')")
        values = source.table[name][:]
        if isinstance(feature, ClassLabel):  # -1 is no label
            names = [name.strip() or str(i) for i, name in enumerate(feature.names)]
            values = [None if value in (None, -1) else names[value] for value in values]
        # `datasets` has converted mixed values, and so changed texts such as "007".
        if not all(isinstance(value, str | int | float | None) for value in values):
            kinds = "dates, lists, bytes, decimals, or texts and numbers"
            raise ValueError(f"has {kinds}: make all values texts that are not dates alone")
        # As a Python number, 0.1 in 32 bits has more digits.
        as_type = str if isinstance(feature, ClassLabel) else column.type.to_pandas_dtype()
        # NaN is what writers other than pandas leave for a missing value.
        texts = [None if value is None or value != value else str(as_type(value)) for value in values]
        return pa.chunked_array([texts], pa.large_string())


def _hash_rows(frame: pd.DataFrame) -> str:
    """Return the hash of the CSV that pandas would write: the same rows have the same hash in every format."""
    digest = hashlib.sha256()
    for start in range(0, len(frame), CHUNK):
        text = frame[start : start + CHUNK].to_csv(index=False, header=start == 0, lineterminator="\n")
        digest.update(text.encode())
    return digest.hexdigest()


def sample_rows(rows: Indices) -> Indices:
    """Return rows at equal distances, no more than `MAX_SAMPLE`; all rows if there are no more."""
    return rows[:: max(1, math.ceil(len(rows) / MAX_SAMPLE))]


def describe_dropped(table: ReviewTable) -> list[str]:
    """Return one line per reason for dropping rows."""
    total = "" if table.parts else f" of {table.rows_read:,}"  # which are those of all parts
    return [f"{len(rows):,}{total} rows with {why}: {list_rows(rows)}" for why, rows in table.dropped.items()]


def list_rows(rows: Sequence[int] | np.ndarray) -> str:
    """Return the first of some data rows for a message."""
    numbers = ", ".join(map(str, rows[:5])) + (", …" if len(rows) > 5 else "")
    return f"row{'s' * (len(rows) != 1)} {numbers} (data rows, counted from 0 below the header, as in predictions.csv)"


# --- classes ----------------------------------------------------------------------------------------------------------


def describe_alike(class_names: Sequence[str]) -> str | None:
    """Name the classes that look alike; None for none. They may have been meant to be one."""
    groups: dict[str, list[str]] = {}
    for name in class_names:
        visible = "".join(c for c in name if unicodedata.category(c) != "Cf")
        groups.setdefault(unicodedata.normalize("NFKC", visible).casefold(), []).append(name)
    alike = "; ".join(list_names(group) for group in groups.values() if len(group) > 1)
    return f"classes that differ only in case, width or invisible characters: {alike}" if alike else None


def _classes_of(labels: pd.Series, source: Source, column: str | None) -> list[str]:
    """Return the classes of the training rows: those of a ClassLabel, in its order, or the distinct labels, sorted."""
    distinct = sorted({*labels.unique()})
    if len(distinct) == 1:
        raise UserError(f"{source.path}: column {column!r} has only one class, {list_names(distinct)}")
    if all(map(INTEGER.fullmatch, distinct)):
        distinct.sort(key=int)
    declared = getattr(source.table.features[column], "names", ())
    return [_class_name(name.strip() or str(i)) for i, name in enumerate(declared)] or distinct


def _class_ids(labels: Iterable[Any], class_names: Sequence[str], new_names: Mapping[str, str]) -> list[int | None]:
    """Return the class id of each distinct label: -1 for a missing one, None for one that is not a class."""
    ids = {name: class_id for class_id, name in enumerate(class_names)} | {"": -1}
    # A file may have the new names instead, unless some of them are original ones, too.
    unknown = {*new_names.values()} - {*new_names} if {*new_names.values()} & {*new_names} else set()
    return [None if label in unknown else ids.get(new_names.get(label, label)) for label in labels]


def _class_name(label: str) -> str:
    """Normalize integers: missing labels turn an integer column into floats, so 1.0 and 1 are the same class."""
    integer = INTEGER.fullmatch(label)
    return str(int(integer[1])) if integer else label
