"""Which rows are in which micro-batch: the same at any number of processes, in every epoch and after a resume."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, product

import numpy as np
import pytest
from helpers.worlds import fake_world
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from app.common.errors import UserError
from app.data.batches import BatchPlan, EvalSet, FullBatchSampler, build_eval_set, form_eval_batches, plan_batches
from app.settings import Settings

BATCH = 24  # rows of a global batch: many numbers divide it


def new_plan(n: int, ranks: int, logical_ranks: int | None = None, accumulation: int = 1) -> BatchPlan:
    flags = {"logical_ranks": logical_ranks, "gradient_accumulation_steps": accumulation}
    return plan_batches(Settings(train_batch_size=BATCH, **flags), n, ranks)


def new_sampler(
    lengths: np.ndarray, plan: BatchPlan, logical_ranks: Sequence[int] = (0,), *, by_length: bool = True
) -> FullBatchSampler:
    return FullBatchSampler(lengths, plan, logical_ranks=logical_ranks, seed=7, group_by_length=by_length)


LENGTHS = st.lists(st.integers(1, 128), min_size=BATCH, max_size=400).map(lambda x: np.asarray(x, dtype=np.int64))


# ---- the rows of a step ----------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(
    lengths=LENGTHS,
    by_length=st.booleans(),
    logical_ranks=st.sampled_from([1, 2, 4, 8]),
    accumulation=st.sampled_from([1, 3]),
    epoch=st.integers(0, 5),
    done=st.floats(0, 1),
)
def test_micro_batches_of_a_logical_rank_are_the_same_on_any_process(
    lengths, by_length, logical_ranks, accumulation, epoch, done
):
    steps = len(lengths) // BATCH
    alone = new_sampler(lengths, new_plan(len(lengths), 1), by_length=by_length)
    alone.set_epoch(epoch)
    batches = alone.batches()
    assert batches.shape == (steps, BATCH)
    assert len(batches.unique()) == steps * BATCH, "a row is repeated"
    if by_length:  # Logical ranks get rows in turn, so each of them has the same range of lengths.
        assert (np.diff(lengths[batches], axis=1) >= 0).all()
    all_ranks = [ranks for ranks in (1, 2, 4, 8) if ranks <= logical_ranks]
    for ranks, interleaved, steps_done in product(all_ranks, (False, True), (0, int(done * steps))):
        plan = new_plan(len(lengths), ranks, logical_ranks, accumulation)
        shares = [plan.logical_ranks_of(rank, interleaved) for rank in range(ranks)]
        assert sorted(chain(*shares)) == list(range(logical_ranks))
        for own in shares:
            sampler = new_sampler(lengths, plan, own, by_length=by_length)
            sampler.set_epoch(epoch, steps_done)
            # Dropout masks belong to the positions of rows in the global batch. A loader forms its batches of
            # consecutive rows. An error about a step whose gradients are not finite names the rows of the epoch.
            places = [place for rank in own for m in range(accumulation) for place in plan.rows_of(rank, m)]
            assert list(sampler) == batches[steps_done:, places].flatten().tolist()
            assert sampler.epoch_rows().equal(batches[:, places])
            assert len(sampler) == steps * len(places)


@given(n=st.integers(BATCH, 400), ranks=st.sampled_from([1, 2, 3, 4, 6, 8]), epoch=st.integers(0, 5))
def test_with_one_logical_rank_per_process_the_rows_are_those_of_a_plain_distributed_sampler(n, ranks, epoch):
    plan = new_plan(n, ranks)
    for rank in range(ranks):
        assert plan.logical_ranks_of(rank) == [rank]
        plain = DistributedSampler(range(n), ranks, rank, shuffle=True, seed=7, drop_last=True)  # type: ignore[arg-type]
        sampler = new_sampler(np.ones(n, dtype=np.int64), plan, [rank], by_length=False)
        for either in (plain, sampler):
            either.set_epoch(epoch)
        assert list(sampler) == list(plain)[: n // BATCH * BATCH // ranks]


def test_grouping_by_length_avoids_most_padding_and_batches_are_in_a_random_order():
    lengths, padding = np.random.default_rng(0).integers(5, 128, size=1_000), []
    for by_length in (True, False):
        batches = lengths[new_sampler(lengths, new_plan(1_000, 1), by_length=by_length).batches()]
        padding.append(1 - batches.sum() / (batches.max(axis=1).sum() * BATCH))
        means = batches.mean(axis=1).tolist()
        assert means not in (sorted(means), sorted(means, reverse=True))
    assert padding[0] < 0.1 * padding[1]


# ---- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "flags", "message"),
    [
        # Fewer processes than logical ranks add gradients along a binary tree, which needs a power of two. PowerSGD's
        # compression errors are those of a process.
        (2, {"logical_ranks": 1}, r"^--logical_ranks 1 .* 2 rank\(s\): start 1 rank\(s\)$"),
        (3, {"logical_ranks": 8}, r"start 1 or 2 or 4 or 8 rank\(s\)$"),
        (16, {"logical_ranks": 8}, r"start 1 or 2 or 4 or 8 rank\(s\)$"),
        (2, {"logical_ranks": 6}, r"start 6 rank\(s\)$"),
        (1, {"logical_ranks": 4, "ddp_comm_hook": "power_sgd"}, r"power_sgd .*: start 4 rank\(s\)$"),
        (3, {}, "^--train_batch_size 32 .* multiple of 3$"),
        (2, {"logical_ranks": 4, "gradient_accumulation_steps": 3}, "--logical_ranks 4 x .*_steps 3: .* of 12$"),
        (2, {"per_device_train_batch_size": 1, "logical_ranks": 4}, "^--per_device_train_batch_size 1 .* of 4$"),
        (1, {"train_batch_size": 1001}, "^1000 training rows .* --train_batch_size 1001 "),
    ],
)
def test_a_batch_that_can_t_be_divided_is_an_error_that_names_what_can(ranks, flags, message):
    with pytest.raises(UserError, match=message):
        plan_batches(Settings(**flags), 1_000, ranks)


def test_an_evaluation_is_due_after_each_interval_and_after_the_last_step():
    plan = plan_batches(Settings(train_batch_size=8, max_steps=11), 40, 1)  # 5 steps per epoch
    expected = {"steps": [4, 8, 11], "epoch": [5, 10, 11], "no": []}
    for strategy, steps in expected.items():
        assert [step for step in range(1, 12) if plan.due(strategy, 4, step)] == steps


def test_steps_and_epochs_follow_from_the_rows():
    of_devices = Settings(per_device_train_batch_size=4, gradient_accumulation_steps=3)
    assert plan_batches(of_devices, 99, 2).global_size == 24
    plan = plan_batches(Settings(gradient_accumulation_steps=2, num_train_epochs=3), 6_988, 4)
    assert (plan.micro_size, plan.steps_per_epoch, plan.total_steps, plan.epochs) == (4, 218, 654, 3)
    assert plan_batches(Settings(num_train_epochs=0.5), 6_988, 1).total_steps == 109
    capped = plan_batches(Settings(max_steps=300), 6_988, 1)
    assert (capped.total_steps, capped.epochs) == (300, 2)


# ---- evaluation ------------------------------------------------------------------------------------------------------


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
