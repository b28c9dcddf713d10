"""The classes of reviews: which label is which class id."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..common.errors import UserError
from .csv_checks import list_names, quote_name

_MAX_CLASSES = 1000
_ALWAYS_ALLOWED_CLASSES = 20  # above this, a column with a distinct value in most rows is not taken for labels

# At most 18 digits, so that the value fits into int64. 007 is treated as a code, not as a number.
_INTEGER = re.compile(r"([+-]?(?:0|[1-9][0-9]{0,17}))(?:\.0*)?")


def form_classes(
    path: Path, label_column: str, distinct: list[str], *, n_rows: int
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Return the sorted class names and the class id of each distinct label, int64."""
    if len(distinct) > _MAX_CLASSES or (len(distinct) > _ALWAYS_ALLOWED_CLASSES and 2 * len(distinct) > n_rows):
        raise UserError(
            f"{path}: column {label_column!r} has {len(distinct):,} distinct values in {n_rows:,} rows "
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
    return tuple(names), np.array([names.index(class_of_value[value]) for value in distinct], dtype=np.int64)


def find_classes(
    path: Path, first_rows: Mapping[str, int], class_names: Sequence[str], *, origin: str = "the model"
) -> NDArray[np.int64]:
    """Return the class id of each distinct label, int64; -1 for an empty one.

    Args:
        first_rows: the first data row with each label.
        origin: what has the classes.
    """
    ids = {name: index for index, name in enumerate(class_names)}
    found = []
    for label, row in first_rows.items():
        class_id = ids.get(label, ids.get(_class_name(label))) if label else -1
        if class_id is None:
            raise UserError(
                f"{path}: row {row}: label {quote_name(label)} is not a class of {origin}, which has "
                f"{list_names(list(class_names))}; leave it out, or choose another column with --label_column"
            )
        found.append(class_id)
    return np.array(found, dtype=np.int64)


def _class_name(value: str) -> str:
    """Normalize integers: missing labels turn an integer column into floats, so 1.0 and 1 are the same class."""
    integer = _INTEGER.fullmatch(value)
    return str(int(integer[1])) if integer else value
