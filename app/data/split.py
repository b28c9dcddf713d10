"""Split reviews into training, validation and test rows: stratified, seeded and identified by a fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from sklearn.model_selection import train_test_split

from ..common.errors import UserError, list_names
from .reviews import CLEANING_RULES, Indices, ReviewTable


@dataclass(frozen=True)
class Split:
    """The rows of each part, as sorted positions in the review table. Parts are disjoint."""

    train: Indices
    validation: Indices  # empty if there are no validation rows
    test: Indices
    # SHA-256 of the bytes, columns, cleaning rules, seed, sizes and positions: runs with equal fingerprints train,
    # validate and test on the same rows.
    fingerprint: str


def split_reviews(
    table: ReviewTable,
    *,
    test_size: float,
    validation_size: float,
    seed: int,
    columns: tuple[str, str] = ("review", "label"),
) -> Split:
    """Hold out test rows, then validation rows from the remaining ones. Published parts of the table stay as they are.

    Args:
        test_size: Fraction of all rows.
        validation_size: Fraction of the remaining rows; 0 for none.
        columns: Names of the text and label columns, which are part of the fingerprint.

    Raises:
        UserError: A class has too few rows to be in every part, or a part would have fewer rows than there are classes.
    """
    published = table.parts
    train = published.get("train", np.arange(len(table), dtype=np.int64))
    recipe: list[object] = [table.sha256, columns, CLEANING_RULES, seed, test_size, validation_size]
    if "test" in published:
        test, recipe[4] = published["test"], None
    else:
        train, test = _hold_out(table, train, test_size, flag="test_size", seed=seed)
    validation = published.get("validation", np.empty(0, dtype=np.int64))
    if "validation" in published:
        recipe[5] = None
    elif validation_size:
        train, validation = _hold_out(table, train, validation_size, flag="validation_size", seed=seed)
    digest = hashlib.sha256(json.dumps(recipe).encode())
    for part in (train, validation, test):
        digest.update(len(part).to_bytes(8, "little") + part.astype("<i8").tobytes())
    return Split(train, validation, test, digest.hexdigest())


def count_duplicates(table: ReviewTable, split: Split) -> dict[str, int]:
    """Count the reviews of a part whose text also occurs, exactly, in another part: as `test_in_train`, for example."""
    texts = {part: table.texts_of(getattr(split, part)) for part in ("train", "validation", "test")}
    pairs = (("test", "train"), ("test", "validation"), ("validation", "train"))
    return {f"{part}_in_{other}": int(texts[part].isin(texts[other]).sum()) for part, other in pairs}


def describe_duplicates(counts: Mapping[str, int]) -> str | None:
    """Describe the result of `count_duplicates` in one line; None if there are no duplicates."""
    found = [f"{n} {parts.replace('_in_', ' reviews also occur in ')}" for parts, n in counts.items() if n]
    return f"{'; '.join(found)} rows: scores on new reviews may be lower" if found else None


def _hold_out(table: ReviewTable, rows: Indices, share: float, *, flag: str, seed: int) -> tuple[Indices, Indices]:
    """Return the remaining and the held-out rows, each sorted."""
    try:
        kept, held_out = train_test_split(rows, test_size=share, stratify=table.labels[rows], random_state=seed)
    except ValueError as problem:  # it names the part with too few rows, but the classes by our ids
        rare = [table.class_names[i] for i in np.flatnonzero(np.bincount(table.labels[rows]) == 1)]
        why = f"only one row has the class {list_names(rare)}: leave it out, or add rows" if rare else problem
        raise UserError(f"--{flag} {share} of the {len(rows)} rows of {table.path}: {why}") from None
    return np.sort(kept), np.sort(held_out)
