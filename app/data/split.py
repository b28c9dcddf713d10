"""The stratified, seeded split into training, validation and test rows, and its fingerprint."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

from app.data.csv_table import CLEANING_RULES, ReviewTable
from app.errors import UserError

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """Positions in the review table, each array int64, sorted, and disjoint from the others.

    `fingerprint` is the SHA-256 over the file's bytes, its columns, the cleaning rules, seed, sizes and positions: two
    runs with equal fingerprints train, validate and test on the same rows.
    """

    train: Indices
    validation: Indices
    test: Indices
    fingerprint: str


def split_reviews(
    table: ReviewTable,
    test_size: float,
    validation_size: float,
    seed: int,
    columns: tuple[str, str] = ("review", "label"),
) -> Split:
    """Sets `test_size` of the rows apart for testing, then `validation_size` of the remaining ones for choosing.

    Raises:
        UserError: a class has too few rows to be in every part, or a part would have fewer rows than there are classes.
    """
    everything = np.arange(len(table), dtype=np.int64)
    train, test = _set_apart(table, everything, test_size, "test_size", seed)
    validation = np.empty(0, dtype=np.int64)
    if validation_size:
        train, validation = _set_apart(table, train, validation_size, "validation_size", seed)

    digest = hashlib.sha256(
        json.dumps([table.sha256, columns, CLEANING_RULES, seed, test_size, validation_size]).encode()
    )
    for part in (train, validation, test):
        digest.update(len(part).to_bytes(8, "little") + part.astype("<i8").tobytes())
    return Split(train, validation, test, digest.hexdigest())


def _set_apart(table: ReviewTable, rows: Indices, share: float, flag: str, seed: int) -> tuple[Indices, Indices]:
    labels = table.labels[rows]
    counts = np.bincount(labels, minlength=len(table.class_names))
    rarest = int(counts.argmin())
    if counts[rarest] < 2:
        raise UserError(
            f"{table.path}: class {table.class_names[rarest]!r} has {counts[rarest]} row to share between training and "
            f"--{flag} {share}: each class needs 2 rows or more"
        )
    try:
        kept, apart = train_test_split(rows, test_size=share, stratify=labels, random_state=seed)
    except ValueError:
        raise UserError(
            f"--{flag} {share} of {len(rows)} rows leaves a part with fewer rows than the {len(counts)} classes: "
            f"choose a share nearer to 0.5 or give more rows ({table.path})"
        ) from None
    return np.sort(kept), np.sort(apart)
