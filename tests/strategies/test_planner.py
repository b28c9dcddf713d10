"""The formulas for the memory of each strategy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.strategies.planner import training_state_bytes

GROUPS = [[torch.empty(10, 4), torch.empty(6, 4), torch.empty(2, 4)], [torch.empty(4), torch.empty(2)]]
ELEMENTS = 40 + 24 + 8 + 4 + 2


def test_the_bytes_of_a_small_model_are_as_counted_by_hand():
    assert training_state_bytes(GROUPS, "ddp", 2) == [16 * ELEMENTS] * 2
    # zero1: rank 0 updates 10 x 4; rank 1 updates 6 x 4, 2 x 4, the 4 and the 2.
    assert training_state_bytes(GROUPS, "zero1", 2) == [8 * ELEMENTS + 8 * 40, 8 * ELEMENTS + 8 * 38]
    # With 4 ranks, rows are divided 3, 3, 3, 1 of 10; 2, 2, 2, 0 of 6; 1, 1, 0, 0 of 2; one each of 4; 1, 1, 0, 0 of 2.
    shards = [12 + 8 + 4 + 1 + 1, 12 + 8 + 4 + 1 + 1, 12 + 8 + 0 + 1 + 0, 4 + 0 + 0 + 1 + 0]
    for strategy in ("zero2", "zero3"):
        assert training_state_bytes(GROUPS, strategy, 4) == [16 * shard for shard in shards]


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 8)), min_size=1, max_size=8),
    st.integers(1, 8),
    st.sampled_from(["zero1", "zero2", "zero3"]),
)
def test_all_ranks_together_hold_each_moment_once(shapes, ranks, strategy):
    groups = [[torch.empty(shape) for shape in shapes]]
    elements = sum(rows * columns for rows, columns in shapes)
    replicated = 8 * elements * ranks if strategy == "zero1" else 0
    sharded = 8 * elements if strategy == "zero1" else 16 * elements
    assert sum(training_state_bytes(groups, strategy, ranks)) == replicated + sharded


def test_other_dtypes_have_other_sizes():
    groups = [[torch.empty(4, 4, dtype=torch.float64)]]
    assert training_state_bytes(groups, "ddp", 1) == [4 * 16 * 8]
    assert training_state_bytes(groups, "zero3", 2) == [pytest.approx(4 * 8 * 8)] * 2
