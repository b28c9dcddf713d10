from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import fake_world

from app.data.sampler import FullBatchSampler, LengthGroupedSampler, plan_batches
from app.distributed.world import World
from app.errors import UserError
from app.settings import Settings


def world(rank: int, size: int) -> World:
    return fake_world(rank, size)


def sampler(strategy: str, lengths: np.ndarray, batch_size: int, rank: int, size: int, epoch: int = 0):
    if strategy == "random":
        made = FullBatchSampler(len(lengths), batch_size, world(rank, size), seed=7)
    else:
        made = LengthGroupedSampler(lengths, batch_size, world(rank, size), seed=7)
    made.set_epoch(epoch)
    return made


def global_batches(strategy: str, lengths: np.ndarray, batch_size: int, size: int, epoch: int = 0) -> list[list[int]]:
    """The rows that all ranks together take at each step."""
    ranks = [list(sampler(strategy, lengths, batch_size, rank, size, epoch)) for rank in range(size)]
    micro = batch_size // size
    steps = len(lengths) // batch_size
    assert all(len(rows) == steps * micro for rows in ranks)
    return [sorted(row for rows in ranks for row in rows[k * micro : (k + 1) * micro]) for k in range(steps)]


lengths_strategy = st.lists(st.integers(1, 128), min_size=24, max_size=400).map(lambda x: np.asarray(x, dtype=np.int64))


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
@given(lengths=lengths_strategy, epoch=st.integers(0, 5))
def test_global_batches_are_the_same_at_any_number_of_ranks_and_no_row_is_repeated(strategy, lengths, epoch):
    single = global_batches(strategy, lengths, 24, 1, epoch)
    for size in (2, 3, 4, 6, 8, 12, 24):
        assert global_batches(strategy, lengths, 24, size, epoch) == single
    seen = [row for batch in single for row in batch]
    assert len(seen) == len(set(seen)) == len(lengths) // 24 * 24


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_each_epoch_has_a_different_order_and_leaves_out_different_rows(strategy):
    lengths = np.arange(1, 101, dtype=np.int64)
    epochs = [global_batches(strategy, lengths, 32, 2, epoch) for epoch in range(4)]
    assert len({str(epoch) for epoch in epochs}) == 4
    left_out = [frozenset(range(100)) - {row for batch in epoch for row in batch} for epoch in epochs]
    assert all(len(rows) == 4 for rows in left_out)
    assert len(set(left_out)) > 1


@given(lengths=lengths_strategy, size=st.sampled_from([2, 3, 4]))
def test_every_rank_has_the_same_range_of_lengths_in_a_micro_batch(lengths, size):
    micro = 24 // size
    ranks = [list(sampler("group_by_length", lengths, 24, rank, size)) for rank in range(size)]
    for k in range(len(lengths) // 24):
        parts = [np.sort(lengths[rows[k * micro : (k + 1) * micro]]) for rows in ranks]
        everything = np.sort(np.concatenate(parts))
        for i in range(micro):  # the i-th row of each rank is among the same `size` neighbors of the sorted batch
            rows_of_ranks = [part[i] for part in parts]
            assert sorted(rows_of_ranks) == everything[i * size : (i + 1) * size].tolist()


def test_grouping_by_length_avoids_most_padding():
    lengths = np.random.default_rng(0).integers(5, 128, size=2_000)

    def padding(strategy: str) -> float:
        batches = [lengths[batch] for batch in global_batches(strategy, lengths, 32, 1)]
        return 1 - sum(b.sum() for b in batches) / sum(len(b) * b.max() for b in batches)

    assert padding("group_by_length") < 0.1 * padding("random")


def test_a_batch_size_that_can_t_be_divided_names_the_nearest_valid_ones():
    with pytest.raises(UserError, match=r"--train_batch_size 32 .* 3 rank.* use 30 or 33"):
        plan_batches(Settings(), 1_000, 3)
    with pytest.raises(UserError, match=r"use 8$"):
        plan_batches(Settings(train_batch_size=3, gradient_accumulation_steps=2), 1_000, 4)
    with pytest.raises(UserError, match=r"31 training rows don't fill one batch"):
        plan_batches(Settings(), 31, 2)


def test_steps_and_epochs_follow_from_the_rows():
    plan = plan_batches(Settings(gradient_accumulation_steps=2), 6_988, 4)
    assert (plan.micro_size, plan.steps_per_epoch, plan.total_steps, plan.epochs) == (4, 218, 654, 3)
    assert plan_batches(Settings(num_train_epochs=0.5), 6_988, 1).total_steps == 109
    capped = plan_batches(Settings(max_steps=300), 6_988, 1)
    assert (capped.total_steps, capped.epochs) == (300, 2)


def test_a_batch_size_per_rank_is_resolved_to_the_global_one():
    plan = plan_batches(Settings(per_device_train_batch_size=4, gradient_accumulation_steps=3), 1_000, 2)
    assert (plan.global_size, plan.micro_size) == (24, 4)
    with pytest.raises(UserError, match=r"20 training rows .* --per_device_train_batch_size 4 x 6 micro-batches = 24"):
        plan_batches(Settings(per_device_train_batch_size=4, gradient_accumulation_steps=3), 20, 2)
