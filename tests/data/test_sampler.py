"""Which rows are in which micro-batch: the same at any number of processes, in every epoch and after a resume."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from app.common.errors import UserError
from app.data.sampler import BatchPlan, FullBatchSampler, plan_batches
from app.settings import Settings

STRATEGIES = ("random", "group_by_length")


def new_plan(n: int, batch_size: int, ranks: int, logical_ranks: int | None = None, accumulation: int = 1) -> BatchPlan:
    settings = Settings(
        train_batch_size=batch_size, logical_ranks=logical_ranks, gradient_accumulation_steps=accumulation
    )
    return plan_batches(settings, n, ranks)


def sampler(strategy: str, lengths: np.ndarray, plan: BatchPlan, logical_ranks: Sequence[int], epoch: int = 0):
    grouped = strategy == "group_by_length"
    rank_sampler = FullBatchSampler(lengths, plan, logical_ranks=logical_ranks, seed=7, group_by_length=grouped)
    rank_sampler.set_epoch(epoch)
    return rank_sampler


def global_batches(strategy: str, lengths: np.ndarray, batch_size: int, size: int, epoch: int = 0) -> list[list[int]]:
    """The rows that all ranks together take at each step."""
    plan = new_plan(len(lengths), batch_size, size)
    ranks = [list(sampler(strategy, lengths, plan, plan.logical_ranks_of(rank), epoch)) for rank in range(size)]
    micro = batch_size // size
    steps = len(lengths) // batch_size
    assert all(len(rows) == steps * micro for rows in ranks)
    return [sorted(row for rows in ranks for row in rows[k * micro : (k + 1) * micro]) for k in range(steps)]


def micro_batches(
    strategy: str, lengths: np.ndarray, plan: BatchPlan, interleaved: bool, epoch: int = 0, steps_done: int = 0
) -> dict[tuple[int, int, int], list[int]]:
    """The rows of every micro-batch on any rank, by step, logical rank and number within the logical rank."""
    by_place: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(plan.ranks):
        logical_ranks = plan.logical_ranks_of(rank, interleaved)
        rank_sampler = sampler(strategy, lengths, plan, logical_ranks)
        rank_sampler.set_epoch(epoch, steps_done)
        rows = list(rank_sampler)  # a loader forms its batches of consecutive rows
        batches = [rows[start : start + plan.micro_size] for start in range(0, len(rows), plan.micro_size)]
        steps = range(steps_done, plan.steps_per_epoch)
        places = list(product(steps, logical_ranks, range(plan.accumulation_steps)))
        assert not by_place.keys() & places
        by_place |= dict(zip(places, batches, strict=True))
    return by_place


lengths_strategy = st.lists(st.integers(1, 128), min_size=24, max_size=400).map(lambda x: np.asarray(x, dtype=np.int64))
layouts = st.sampled_from([(v, w) for v in (1, 2, 4, 8) for w in (1, 2, 4, 8) if v % w == 0])


# ---- the rows of a step ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=50)
@given(lengths=lengths_strategy, epoch=st.integers(0, 5))
def test_global_batches_are_the_same_at_any_number_of_ranks_and_no_row_is_repeated(strategy, lengths, epoch):
    single = global_batches(strategy, lengths, 24, 1, epoch)
    for size in (2, 3, 4, 6, 8, 12, 24):
        assert global_batches(strategy, lengths, 24, size, epoch) == single
    seen = [row for batch in single for row in batch]
    assert len(seen) == len(set(seen)) == len(lengths) // 24 * 24


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=50)
@given(
    lengths=lengths_strategy,
    logical_ranks=st.sampled_from([1, 2, 4, 8]),
    accumulation=st.sampled_from([1, 3]),
    epoch=st.integers(0, 5),
    done=st.floats(0, 1),
)
def test_micro_batches_of_a_logical_rank_are_the_same_on_any_process(
    strategy, lengths, logical_ranks, accumulation, epoch, done
):
    expected = None
    for ranks in (1, 2, 4, 8):
        if logical_ranks % ranks:
            continue
        plan = new_plan(len(lengths), 24, ranks, logical_ranks, accumulation)
        for interleaved in (False, True):
            batches = micro_batches(strategy, lengths, plan, interleaved, epoch)
            expected = expected or batches
            assert batches == expected
            assert len(batches) == plan.steps_per_epoch * logical_ranks * accumulation
            steps_done = int(done * plan.steps_per_epoch)
            rest = micro_batches(strategy, lengths, plan, interleaved, epoch, steps_done)
            assert rest == {place: rows for place, rows in expected.items() if place[0] >= steps_done}


@given(n=st.integers(24, 400), ranks=st.sampled_from([1, 2, 3, 4, 6, 8]), epoch=st.integers(0, 5))
def test_with_one_logical_rank_per_process_the_rows_are_those_of_a_plain_distributed_sampler(n, ranks, epoch):
    plan = new_plan(n, 24, ranks)
    for rank in range(ranks):
        (logical_rank,) = plan.logical_ranks_of(rank)
        assert logical_rank == rank
        plain = DistributedSampler(range(n), ranks, rank, shuffle=True, seed=7, drop_last=True)  # type: ignore[arg-type]
        plain.set_epoch(epoch)
        rows = list(sampler("random", np.ones(n, dtype=np.int64), plan, [rank], epoch))
        assert rows == list(plain)[: len(rows)]
        assert len(rows) == n // 24 * 24 // ranks


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(lengths=lengths_strategy, layout=layouts, interleaved=st.booleans())
def test_the_rows_of_a_single_step_are_those_that_the_loader_gets(strategy, lengths, layout, interleaved):
    """An error message about a step that is not finite names them."""
    plan = new_plan(len(lengths), 24, layout[1], layout[0])
    rank_sampler = sampler(strategy, lengths, plan, plan.logical_ranks_of(layout[1] - 1, interleaved), epoch=2)
    rows, per_step = list(rank_sampler), 24 // plan.ranks
    assert len(rank_sampler) == len(rows) == plan.steps_per_epoch * per_step
    for step in range(plan.steps_per_epoch):
        assert rank_sampler.epoch_rows()[step].tolist() == rows[step * per_step : (step + 1) * per_step]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_epoch_has_a_different_order_and_leaves_out_different_rows(strategy):
    lengths = np.arange(1, 101, dtype=np.int64)
    epochs = [global_batches(strategy, lengths, 32, 2, epoch) for epoch in range(4)]
    assert len({str(epoch) for epoch in epochs}) == 4
    left_out = [frozenset(range(100)) - {row for batch in epoch for row in batch} for epoch in epochs]
    assert all(len(rows) == 4 for rows in left_out)
    assert len(set(left_out)) > 1


@settings(max_examples=50)
@given(lengths=lengths_strategy, size=st.sampled_from([2, 3, 4]))
def test_every_rank_has_the_same_range_of_lengths_in_a_micro_batch(lengths, size):
    micro, plan = 24 // size, new_plan(len(lengths), 24, size)
    ranks = [list(sampler("group_by_length", lengths, plan, [rank])) for rank in range(size)]
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


# ---- logical ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@given(share=st.integers(1, 16), ranks=st.integers(1, 16))
def test_each_logical_rank_belongs_to_one_process(interleaved, share, ranks):
    plan = BatchPlan(1, ranks, share * ranks, 1, 1, 1, 1, 1)
    processes = [plan.logical_ranks_of(rank, interleaved) for rank in range(ranks)]
    assert sorted(one for process in processes for one in process) == list(range(share * ranks))
    for process in processes:
        assert len(process) == plan.logical_ranks_per_rank == share
        distances = {b - a for a, b in pairwise(process)}
        assert distances <= {ranks if interleaved else 1}
    # The n-th logical ranks of all processes: neighbors if interleaved, otherwise `share` apart.
    for group in zip(*processes, strict=True):
        assert {b - a for a, b in pairwise(group)} <= {1 if interleaved else share}


def test_the_number_of_micro_batches_of_a_process_depends_on_the_number_of_processes():
    for ranks, per_process in ((1, 24), (2, 12), (4, 6), (8, 3)):
        plan = new_plan(1_000, 48, ranks, 8, 3)
        assert (plan.micro_batches_per_step, plan.micro_size, plan.global_size) == (per_process, 2, 48)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (new_plan(100, 32, 1), "32 rows per step = 1 rank(s) x 32 rows x 1 micro-batch(es)"),
        (new_plan(100, 32, 2, None, 2), "32 rows per step = 2 rank(s) x 8 rows x 2 micro-batch(es)"),
        (new_plan(100, 32, 2, 8, 2), "32 rows per step = 8 logical ranks (on 2 rank(s)) x 2 rows x 2 micro-batch(es)"),
        (new_plan(100, 32, 4, 4), "32 rows per step = 4 rank(s) x 8 rows x 1 micro-batch(es)"),
    ],
)
def test_a_plan_describes_itself(plan, text):
    assert str(plan) == text


# ---- errors ----------------------------------------------------------------------------------------------------------


def error_of(n_train: int, ranks: int, **changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        plan_batches(Settings(**changes), n_train, ranks)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize(("logical_ranks", "ranks"), [(1, 2), (2, 3), (4, 3), (4, 8), (8, 3), (8, 5), (8, 16), (8, 12)])
def test_logical_ranks_that_can_t_be_divided_among_the_ranks_are_an_error_that_names_valid_numbers(
    logical_ranks, ranks
):
    message = error_of(1_000, ranks, logical_ranks=logical_ranks, train_batch_size=48)
    assert re.search(rf"\b{logical_ranks}\b.* cannot be divided among {ranks} rank", message)
    suggested = [int(number) for number in re.findall(r"\d+", message.partition(": start ")[2])]
    assert suggested == [n for n in range(1, logical_ranks + 1) if logical_ranks % n == 0]
    for n in suggested:
        new_plan(1_000, 48, n, logical_ranks)  # no error


@pytest.mark.parametrize(("logical_ranks", "ranks"), [(6, 3), (6, 2), (3, 1), (12, 4)])
def test_several_logical_ranks_per_process_must_be_a_power_of_two(logical_ranks, ranks):
    """A run on 3 ranks has 3 logical ranks, which no other number of processes adds in the same order."""
    assert error_of(1_000, ranks, train_batch_size=48, logical_ranks=logical_ranks) == (
        f"--logical_ranks {logical_ranks} cannot be divided among {ranks} rank(s): start {logical_ranks} rank(s)"
    )
    plan = new_plan(1_000, 48, logical_ranks, logical_ranks)
    assert (plan.logical_ranks, plan.ranks, plan.micro_size) == (logical_ranks, logical_ranks, 48 // logical_ranks)


def test_a_batch_size_that_can_t_be_divided_names_its_divisor():
    with pytest.raises(UserError, match=r"--train_batch_size 32 .* 3 rank.* multiple of 3$"):
        plan_batches(Settings(), 1_000, 3)
    with pytest.raises(UserError, match=r"multiple of 8$"):
        plan_batches(Settings(train_batch_size=3, gradient_accumulation_steps=2), 1_000, 4)
    with pytest.raises(UserError, match=r"31 training rows do not fill one batch"):
        plan_batches(Settings(), 31, 2)


@given(
    size=st.integers(1, 200),
    layout=st.sampled_from([(1, 1), (4, 1), (4, 2), (8, 8), (16, 4)]),
    accumulation=st.integers(1, 5),
)
def test_a_batch_size_that_the_logical_ranks_don_t_divide_names_a_valid_divisor(size, layout, accumulation):
    logical_ranks, ranks = layout
    changes = {"logical_ranks": logical_ranks, "gradient_accumulation_steps": accumulation}
    if size % (logical_ranks * accumulation) == 0:
        assert plan_batches(Settings(train_batch_size=size, **changes), 1_000, ranks).global_size == size
        return
    message = error_of(1_000, ranks, train_batch_size=size, **changes)
    kind = f"{ranks} rank(s)" if logical_ranks == ranks else f"--logical_ranks {logical_ranks}"
    assert f"--train_batch_size {size} cannot be divided among {kind} x" in message
    valid = int(message.rpartition("multiple of ")[2])
    assert plan_batches(Settings(train_batch_size=valid, **changes), 1_000, ranks).global_size == valid


def test_rows_of_a_micro_batch_are_their_positions_in_the_global_batch():
    plan, lengths = new_plan(48, 24, 2, logical_ranks=4, accumulation=3), np.arange(48)
    for rank in range(2):
        own = sampler("random", lengths, plan, plan.logical_ranks_of(rank))
        (batch, *_), rows = own.batches().tolist(), own.epoch_rows()[0].tolist()
        places = [place for rank in own.logical_ranks for m in range(3) for place in plan.rows_of(rank, m)]
        assert [batch[place] for place in places] == rows


def test_batches_of_similar_length_are_in_a_random_order():
    plan, lengths = new_plan(480, 24, 1), np.arange(480)
    means = sampler("group_by_length", lengths, plan, [0]).batches().double().mean(dim=1).tolist()
    assert means not in (sorted(means), sorted(means, reverse=True))


def test_an_evaluation_is_due_after_each_interval_and_after_the_last_step():
    plan = plan_batches(Settings(train_batch_size=8, max_steps=11), 40, 1)  # 5 steps per epoch
    expected = {"steps": [4, 8, 11], "epoch": [5, 10, 11], "no": []}
    for strategy, steps in expected.items():
        assert [step for step in range(1, 12) if plan.due(strategy, 4, step)] == steps


def test_steps_and_epochs_follow_from_the_rows():
    plan = plan_batches(Settings(gradient_accumulation_steps=2, num_train_epochs=3), 6_988, 4)
    assert (plan.micro_size, plan.steps_per_epoch, plan.total_steps, plan.epochs) == (4, 218, 654, 3)
    assert plan_batches(Settings(num_train_epochs=0.5), 6_988, 1).total_steps == 109
    capped = plan_batches(Settings(max_steps=300), 6_988, 1)
    assert (capped.total_steps, capped.epochs) == (300, 2)


def test_a_batch_size_per_rank_is_resolved_to_the_global_one():
    plan = plan_batches(Settings(per_device_train_batch_size=4, gradient_accumulation_steps=3), 1_000, 2)
    assert (plan.global_size, plan.micro_size) == (24, 4)
    with pytest.raises(UserError, match=r"20 training rows .* --per_device_train_batch_size 4 \(24 rows"):
        plan_batches(Settings(per_device_train_batch_size=4, gradient_accumulation_steps=3), 20, 2)


def test_an_error_about_a_batch_size_per_rank_names_the_flag_that_was_given():
    assert "--per_device_train_batch_size 1" in error_of(1_000, 2, per_device_train_batch_size=1, logical_ranks=4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_power_sgd_needs_one_rank_per_logical_rank(ranks):
    settings = Settings(ddp_comm_hook="power_sgd", logical_ranks=4)
    with pytest.raises(
        UserError,
        match=f"--ddp_comm_hook power_sgd cannot be divided among {ranks} rank.*: start 4 rank",
    ):
        plan_batches(settings, 1_000, ranks)
    assert plan_batches(settings, 1_000, 4).ranks == 4
    assert plan_batches(Settings(ddp_comm_hook="power_sgd"), 1_000, ranks).ranks == ranks
