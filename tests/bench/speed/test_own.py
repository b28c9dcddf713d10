"""The batches of a round represent those of complete epochs."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.worlds import batch_plan

from app.bench.speed.own import SamplerOfRounds, represent
from app.data.sampler import FullBatchSampler


def test_each_round_has_one_batch_of_each_quantile_of_length():
    lengths = np.random.default_rng(0).permutation(100)
    order = represent(lengths, 5, 4, seed=1)
    rounds = lengths[order].reshape(4, 5)
    for one in rounds:
        assert sorted(one // 20) == [0, 1, 2, 3, 4]
    assert len(set(order.tolist())) == 20, "each batch once"
    assert {tuple(one // 20) for one in rounds} != {(0, 1, 2, 3, 4)}, "not sorted by length"
    # Together, the rounds are as long as the epoch.
    assert rounds.mean() == pytest.approx(lengths.mean(), abs=1)
    assert order.tolist() == represent(lengths, 5, 4, seed=1).tolist(), "the same on every rank"


def test_all_batches_are_chosen_if_there_are_no_more():
    assert sorted(represent(np.array([3, 1, 2, 5, 4, 6]), 2, 3, seed=0).tolist()) == [0, 1, 2, 3, 4, 5]


def sampler(group_by_length: bool, steps: int, rounds: int, *, ranks: tuple[int, ...] = (0, 1)) -> SamplerOfRounds:
    lengths = np.random.default_rng(0).integers(3, 128, 40)  # 10 batches of 2 ranks x 2 rows
    plan = batch_plan(logical_ranks=2)
    made = SamplerOfRounds(lengths, plan, logical_ranks=ranks, seed=7, group_by_length=group_by_length)
    made.steps, made.rounds = steps, rounds
    return made


def epoch(group_by_length: bool, number: int) -> list[list[int]]:
    """The batches of an epoch of the training paths."""
    of_paths = sampler(group_by_length, 1, 1)
    of_paths.set_epoch(number)
    return FullBatchSampler.batches(of_paths).tolist()


def test_the_batches_of_rounds_are_batches_of_an_epoch():
    batches = sampler(True, 4, 2).batches().tolist()
    assert len(batches) == 8
    assert len({tuple(batch) for batch in batches}) == 8
    assert all(batch in epoch(True, 0) for batch in batches)


def test_more_rounds_than_an_epoch_has_batches_for_continue_with_the_next_one():
    batches = sampler(True, 5, 3).batches().tolist()
    assert len(batches) == 15
    assert all(batch in epoch(True, 0) + epoch(True, 1) for batch in batches)
    assert any(batch in epoch(True, 1) for batch in batches)


def test_random_batches_are_consecutive_ones():
    assert sampler(False, 6, 2).batches().tolist() == (epoch(False, 0) + epoch(False, 1))[:12]


def test_ranks_divide_the_batches_as_in_training():
    both = sampler(True, 4, 2)
    shares = [sampler(True, 4, 2, ranks=(rank,)) for rank in range(2)]
    assert [list(share) for share in shares] == [both.batches()[:, rank::2].flatten().tolist() for rank in range(2)]
    assert len(both) == len(list(both)) == 32
