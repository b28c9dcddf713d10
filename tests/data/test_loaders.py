"""Evaluation batches are formed before they are assigned to ranks, and every rank runs the same number of them."""

from __future__ import annotations

import numpy as np
from helpers.worlds import fake_world
from hypothesis import given
from hypothesis import strategies as st

from app.data.loaders import EvalSet, build_eval_set, form_eval_batches


def eval_sets(lengths: np.ndarray, ranks: int, batch_size: int) -> list[EvalSet]:
    """Every rank's share of rows with these lengths, which are their own positions, as they are in the batches."""
    rows, batches = list(range(len(lengths))), form_eval_batches(lengths, batch_size)
    options = {"batches": batches, "collator": lambda rows: rows}
    return [
        build_eval_set("test", rows, np.zeros_like(lengths), world=fake_world(rank, ranks), **options)
        for rank in range(ranks)
    ]


def real_batches(share: EvalSet) -> list[list[int]]:
    return [batch for batch, is_filler in zip(share.loader, share.is_filler, strict=True) if not is_filler]


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=100).map(np.array),
    ranks=st.integers(1, 7),
    batch_size=st.integers(1, 9),
)
def test_each_row_is_evaluated_once_in_a_batch_that_is_the_same_at_any_number_of_ranks(lengths, ranks, batch_size):
    """So are the padding and the order of the additions in a matrix product, and with them the logits."""
    n, shares = len(lengths), eval_sets(lengths, ranks, batch_size)
    # The longest come first, and only the last of the sorted rows may be in a smaller batch.
    expected = real_batches(*eval_sets(lengths, 1, batch_size))
    assert [lengths[batch].tolist() for batch in expected] == [
        sorted(lengths)[start : start + batch_size] for start in reversed(range(0, n, batch_size))
    ]
    assert sorted(batch for share in shares for batch in real_batches(share)) == sorted(expected)
    assert sorted(row for share in shares for row in share.positions) == list(range(n))
    assert len({len(share.loader) for share in shares}) == 1, "a forward pass of a sharded model would wait forever"
    for share in shares:
        assert [row for batch in real_batches(share) for row in batch] == list(share.positions)
        assert sum(share.is_filler) <= 1, "the ranks do not have the same work"
