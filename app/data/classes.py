"""The classes of reviews: which label is which class id."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..common.errors import UserError, list_names

MAX_CLASSES = 1000
ALWAYS_ALLOWED = 20  # above this, a column with a distinct value in most rows is not taken for labels
# At most 18 digits, so that the value fits into int64. 007 is treated as a code, not as a number.
INTEGER = re.compile(r"([+-]?(?:0|[1-9][0-9]{0,17}))(?:\.0*)?")


def form_classes(path: Path, label_column: str, labels: list[str], *, n_rows: int) -> list[str]:
    """Return the sorted class names of some distinct labels."""
    if len(labels) > MAX_CLASSES or (len(labels) > ALWAYS_ALLOWED and 2 * len(labels) > n_rows):
        raise UserError(
            f"{path}: column {label_column!r} has {len(labels):,} distinct values in {n_rows:,} rows "
            f"({list_names(labels[:3])}, …): too many to be classes; choose another column with --label_column"
        )
    names = sorted({_class_name(label) for label in labels})
    if len(names) == 1:
        raise UserError(
            f"{path}: column {label_column!r} has only one class, {list_names(names)}; at least two are required"
        )
    return sorted(names, key=int) if all(map(INTEGER.fullmatch, names)) else names


def find_class(label: str, classes: Sequence[str], names: Mapping[str, str]) -> int | None:
    """Return the class id of a label; -1 for an empty one, None for one that is not a class.

    Args:
        names: those of some labels whose classes have other names.
    """
    for name in (label, _class_name(label)):
        if names.get(name, name) in classes:
            return classes.index(names.get(name, name))
    return None if label else -1


def _class_name(label: str) -> str:
    """Normalize integers: missing labels turn an integer column into floats, so 1.0 and 1 are the same class."""
    integer = INTEGER.fullmatch(label)
    return str(int(integer[1])) if integer else label


def rename_classes(classes: Sequence[str], names: Mapping[str, str], *, origin: str) -> tuple[str, ...]:
    """Return the classes with other names for some of them.

    Args:
        origin: what has the classes, for messages.
    """
    if unknown := [label for label in names if label not in classes]:
        raise UserError(
            f"--label_names: {list_names(unknown[:1])} is not a class of {origin}, which has {list_names(classes)}"
        )
    renamed = tuple(names.get(label, label) for label in classes)
    if len(set(renamed)) < len(renamed):
        raise UserError(f"--label_names: two classes have the name {max(renamed, key=renamed.count)!r}")
    return renamed
