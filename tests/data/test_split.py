"""The split and its fingerprint."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.common.errors import UserError
from app.data.reviews import ReviewTable
from app.data.split import Split, count_duplicates, describe_duplicates, split_reviews


def table_of(labels: list[int], sha256: str = "0") -> ReviewTable:
    names = tuple(str(i) for i in range(max(labels) + 1))
    n = len(labels)
    return ReviewTable(
        Path("t.csv"), sha256, n, {}, names, np.arange(n), pd.Series(["好"] * n), np.asarray(labels, dtype=np.int64)
    )


@given(
    counts=st.lists(st.integers(20, 60), min_size=2, max_size=4),
    test_size=st.floats(0.2, 0.8),
    validation_size=st.sampled_from([0.0, 0.25, 0.5]),
    seed=st.integers(0, 2**32 - 1),
)
def test_parts_are_disjoint_and_cover_all_rows_and_preserve_class_proportions(counts, test_size, validation_size, seed):
    table = table_of([label for label, count in enumerate(counts) for _ in range(count)])
    split = split_reviews(table, test_size=test_size, validation_size=validation_size, seed=seed)
    parts = (split.train, split.validation, split.test)
    assert sorted(np.concatenate(parts)) == list(range(len(table)))
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    for label, count in enumerate(counts):  # because the number of test rows is rounded up
        share = count * len(split.test) / len(table)
        assert abs((table.labels[split.test] == label).sum() - share) < 1
    assert abs(len(split.test) - len(table) * test_size) < 1
    again = split_reviews(table, test_size=test_size, validation_size=validation_size, seed=seed)
    assert again.fingerprint == split.fingerprint, "of the positions, too"
    other = split_reviews(table, test_size=test_size, validation_size=validation_size, seed=(seed + 1) % 2**32)
    assert not np.array_equal(other.test, split.test)


LABELS = [0, 0, 1] * 30
SIZES = {"test_size": 0.2, "validation_size": 0.0, "seed": 42}


def test_the_fingerprint_covers_everything_that_determines_the_split():
    table = table_of(LABELS)
    changed = [{}, {"seed": 43}, {"test_size": 0.21}, {"validation_size": 0.1}, {"columns": ("text", "label")}]
    fingerprints = {split_reviews(table, **SIZES | change).fingerprint for change in changed}
    for other in (table_of(LABELS, "1"), table_of(LABELS[1:] + LABELS[:1])):
        fingerprints.add(split_reviews(other, **SIZES).fingerprint)
    assert [len(fingerprint) for fingerprint in fingerprints] == [64] * 7


@pytest.mark.parametrize(
    ("labels", "sizes", "message"),
    [
        (
            [0] * 50 + [1],
            {},
            r"--test_size 0\.2 of the 51 rows of t\.csv: only one row has the class '1': leave it out, or add rows$",
        ),
        (LABELS, {"test_size": 0.001}, r"--test_size 0\.001"),
        (LABELS, {"validation_size": 0.001}, r"--validation_size 0\.001"),
    ],
)
def test_classes_with_too_few_rows_and_parts_that_are_too_small_are_rejected(labels, sizes, message):
    with pytest.raises(UserError, match=message):
        split_reviews(table_of(labels), **SIZES | sizes)


def test_reviews_that_occur_in_several_parts_are_counted():
    """Equal means equal to the letter: the cleaning rules keep the reviews so."""
    texts = pd.Series(["好", "差", "好", "好 ", "新", "差", "新", "X", "x"])
    split = Split(np.array([0, 1, 8]), np.array([4, 5]), np.array([2, 3, 6, 7]), "f")
    counts = count_duplicates(dataclasses.replace(table_of([0, 1] * 9), texts=texts), split)
    assert counts == {"test_in_train": 1, "test_in_validation": 1, "validation_in_train": 1}
    assert describe_duplicates(dict.fromkeys(counts, 0)) is None
