"""Eval sets are divided among the ranks so that counts are exact and every rank runs the same number of batches."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from worlds import fake_world

from app.data.loaders import EvalSet, build_eval_set
from app.settings import Settings


def eval_sets(n: int, ranks: int, batch_size: int) -> tuple[list[EvalSet], np.ndarray]:
    """Every rank's share of n rows, which are their own positions, and the lengths of the rows."""
    lengths = np.random.default_rng(n).integers(1, 50, size=n)
    settings = Settings(eval_batch_size=batch_size)
    labels = np.zeros(n, dtype=np.int64)
    return [
        build_eval_set("test", list(range(n)), lengths, labels, lambda rows: rows, fake_world(rank, ranks), settings)
        for rank in range(ranks)
    ], lengths


SIZES = {"n": st.integers(1, 100), "ranks": st.integers(1, 7), "batch_size": st.integers(1, 9)}


@given(**SIZES)
def test_each_row_is_evaluated_on_exactly_one_rank(n, ranks, batch_size):
    shares, _ = eval_sets(n, ranks, batch_size)
    assert sorted(row for share in shares for row in share.positions) == list(range(n))
    assert max(len(share.positions) for share in shares) - min(len(share.positions) for share in shares) <= 1


@given(**SIZES)
def test_every_rank_has_the_same_number_of_batches_and_filler_is_marked(n, ranks, batch_size):
    shares, _ = eval_sets(n, ranks, batch_size)
    assert len({len(share.loader) for share in shares}) == 1
    for share in shares:
        batches = list(share.loader)
        assert len(batches) == len(share.is_filler)
        real = [batch for batch, is_filler in zip(batches, share.is_filler, strict=True) if not is_filler]
        assert [row for batch in real for row in batch] == list(share.positions)
        assert all(len(batch) <= batch_size for batch in batches)


def test_rows_of_similar_length_are_evaluated_together():
    shares, lengths = eval_sets(40, 2, 5)
    for share in shares:
        assert sorted(lengths[list(share.positions)]) == lengths[list(share.positions)].tolist()
