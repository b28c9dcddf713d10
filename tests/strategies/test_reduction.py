"""Gradients are added as one binary tree over the logical ranks, at every number of processes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from helpers.gradients import Bucket, add_neighbors, flat
from helpers.worlds import ThreadNetwork, batch_plan, fake_world
from hypothesis import given, settings
from hypothesis import strategies as st

from app.data.sampler import BatchPlan
from app.distributed import collectives
from app.strategies import reduction
from app.strategies.reduction import (
    FixedOrderAllReduce,
    TreeSum,
    buckets_in_flight,
    reduce_scatter_pairwise,
    sum_pairwise,
)

SHAPES = ((5,), (3, 4), ())  # of the parameters
LAYOUTS = [(1 << v, 1 << w) for v in range(6) for w in range(v + 1)]  # logical ranks, processes
SEEDS = st.integers(0, 2**32 - 1)


def gradients(seed: int, logical_ranks: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[list[torch.Tensor]]:
    """The gradients of each logical rank, one tensor per parameter. They differ so much in size that sums round."""
    draw = np.random.default_rng(seed)

    def tensor(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(draw.normal(size=shape) * 10 ** draw.uniform(-3, 3, size=shape), dtype=torch.float32)

    return [[tensor(shape) for shape in shapes] for _ in range(logical_ranks)]


def sum_of_process(leaves: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Add the gradients of a process's logical ranks as the strategies do."""
    sums = TreeSum()
    for leaf in leaves[:-1]:
        sums.add([tensor.clone() for tensor in leaf])
    last = [tensor.clone() for tensor in leaves[-1]]
    sums.add_to_last_leaf(last, range(len(last)))
    return last


def sum_contiguous(leaves: Sequence[Sequence[torch.Tensor]], plan: BatchPlan) -> torch.Tensor:
    """Each process adds its own logical ranks first, as DDP does."""
    processes = [sum_of_process([leaves[i] for i in plan.logical_ranks_of(rank)]) for rank in range(plan.ranks)]
    return sum_pairwise(torch.stack([flat(one) for one in processes]))


def sum_interleaved(leaves: Sequence[Sequence[torch.Tensor]], plan: BatchPlan) -> torch.Tensor:
    """The processes add the n-th logical ranks of all of them first, as a sharded strategy does."""
    logical_ranks = [plan.logical_ranks_of(rank, interleaved=True) for rank in range(plan.ranks)]
    across = [sum_pairwise(torch.stack([flat(leaves[i]) for i in group])) for group in zip(*logical_ranks, strict=True)]
    return flat(sum_of_process([[one] for one in across]))


@pytest.mark.parametrize(("logical_ranks", "ranks"), LAYOUTS)
@settings(max_examples=20)
@given(seed=SEEDS)
def test_the_sum_has_the_same_bits_at_every_number_of_processes(logical_ranks, ranks, seed):
    leaves, plan = gradients(seed, logical_ranks), batch_plan(ranks, logical_ranks)
    complete = sum_pairwise(torch.stack([flat(leaf) for leaf in leaves]))
    assert torch.equal(complete, add_neighbors([flat(leaf) for leaf in leaves]))
    assert torch.equal(sum_contiguous(leaves, plan), complete)
    assert torch.equal(sum_interleaved(leaves, plan), complete)


@pytest.mark.parametrize("logical_ranks", [4, 8, 16])
def test_any_other_order_of_the_additions_has_other_bits(logical_ranks):
    """Otherwise the test above could not fail."""
    leaves = gradients(1, logical_ranks, [(200,)])
    tree = sum_pairwise(torch.stack([flat(leaf) for leaf in leaves]))
    sequential = leaves[0][0].clone()
    for leaf in leaves[1:]:
        sequential += leaf[0]
    assert not torch.equal(sequential, tree)
    assert torch.allclose(sequential, tree, rtol=1e-3, atol=1e-2)
    for first, second in ((1, 2), (0, logical_ranks - 1)):
        swapped = leaves.copy()
        swapped[first], swapped[second] = swapped[second], swapped[first]
        assert not torch.equal(sum_pairwise(torch.stack([flat(leaf) for leaf in swapped])), tree)
    plan = batch_plan(2, logical_ranks)
    processes = [sum_of_process([leaves[i] for i in plan.logical_ranks_of(rank, True)]) for rank in range(2)]
    assert not torch.equal(sum_pairwise(torch.stack([flat(one) for one in processes])), tree), "interleaved, own first"


@given(seed=SEEDS, n=st.integers(1, 33))
def test_an_unpaired_last_row_is_carried_to_the_next_level(seed, n):
    """Without --logical_ranks, the number of ranks need not be a power of two."""
    rows = torch.stack([flat(leaf) for leaf in gradients(seed, n)])
    expected = add_neighbors(list(rows.clone()))
    assert torch.equal(sum_pairwise(rows.clone()), expected)
    if n == 3:
        assert torch.equal((rows[0] + rows[1]) + rows[2], expected)


def test_only_the_partial_sums_of_complete_subtrees_are_held():
    sums = TreeSum()
    for n, leaf in enumerate(gradients(0, 32), start=1):
        sums.add(leaf)
        assert [level for level, _ in sums.partial_sums] == [bit for bit in range(5, -1, -1) if n >> bit & 1]
    sums.clear()
    last = gradients(1, 1)[0]
    before = [tensor.clone() for tensor in last]
    sums.add_to_last_leaf(last, range(len(last)))
    assert all(map(torch.equal, last, before)), "something of the step before is left"


@given(seed=SEEDS, logical_ranks=st.sampled_from([1, 2, 4, 8]), indices=st.permutations(range(4)), n=st.integers(1, 4))
def test_partial_sums_can_be_added_to_some_of_the_parameters_at_a_time(seed, logical_ranks, indices, n):
    """DDP hands over one bucket of parameters after another, in an order of its own."""
    leaves = gradients(seed, logical_ranks, [(2,), (3,), (4,), (5,)])
    sums = TreeSum()
    for leaf in leaves[:-1]:
        sums.add([tensor.clone() for tensor in leaf])
    last = [tensor.clone() for tensor in leaves[-1]]
    sums.add_to_last_leaf([last[i] for i in indices[:n]], indices[:n])
    for i in range(4):
        complete = add_neighbors([leaf[i] for leaf in leaves])
        assert torch.equal(last[i], complete if i in indices[:n] else leaves[-1][i])


# ---- across processes, which are threads here ------------------------------------------------------------------------


ONE_LEVEL = [(3, None, None), (4, 4, None), (4, 16, None), (5, None, None), (8, 8, None), (8, 8, 1), (6, None, 3)]
TWO_LEVELS = [(4, 4, 2), (4, 16, 2), (6, None, 2), (8, 8, 4), (12, None, 4)]


@pytest.mark.parametrize(("ranks", "logical_ranks", "inside"), [*ONE_LEVEL, *TWO_LEVELS])
@pytest.mark.parametrize("buckets", [[[3, 2, 1, 0]], [[3], [2], [1], [0], [4], [5]], [[0, 1], [3, 2]]])
def test_the_communication_hook_averages_every_bucket_in_the_order_of_the_tree(
    monkeypatch, ranks, logical_ranks, inside, buckets
):
    # Most buckets do not divide evenly among 3, 4, 5, 6, 8 or 12 ranks.
    shapes = [(7,), (2, 3), (1,), (30,), (25,), (26,)][: max(map(max, buckets)) + 1]
    plan = batch_plan(ranks, logical_ranks)
    leaves = gradients(3, plan.logical_ranks, shapes)
    network = ThreadNetwork(ranks)
    for module in (reduction, collectives):
        monkeypatch.setattr(module, "dist", network)
    monkeypatch.setattr(reduction, "all_gather_single", network.all_gather_single)

    def work(rank: int) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        sums = TreeSum()
        hook = FixedOrderAllReduce(parameters, sums, network.world(rank, inside))
        averages = []
        for _ in range(2):  # steps
            *others, last = ([tensor.clone() for tensor in leaves[i]] for i in plan.logical_ranks_of(rank))
            for leaf in others:
                sums.add(leaf)
            for parameter, gradient in zip(parameters, last, strict=True):
                parameter.grad = gradient
            filled = [Bucket(indices, parameters, indices is buckets[-1]) for indices in buckets]
            futures = [hook.average(bucket) for bucket in filled]
            sums.clear()
            assert all(future.done() for future in futures), "DDP waits for them after the last bucket"
            assert all(torch.equal(future.value(), b.buffer()) for future, b in zip(futures, filled, strict=True))
            by_index = {i: g for b in filled for i, g in zip(b.indices, b.gradients(), strict=True)}
            averages.append(flat([by_index[i] for i in range(len(shapes))]))
        assert torch.equal(*averages)
        return averages

    expected = add_neighbors([flat(leaf) for leaf in leaves]) / ranks
    for averages in network.run(work):
        assert torch.equal(averages[0], expected)


LAYOUTS_OF_NODES = [(1, None), (2, None), (3, None), (4, None), (8, None), (4, 2), (6, 2), (6, 3), (8, 2), (16, 4)]


@pytest.mark.parametrize(("ranks", "inside"), LAYOUTS_OF_NODES)
def test_each_rank_gets_its_own_row_of_the_sum(monkeypatch, ranks, inside):
    inputs = [gradients(rank, 1, [(ranks, 6)])[0][0] for rank in range(ranks)]
    network = ThreadNetwork(ranks)
    monkeypatch.setattr(reduction, "dist", network)
    sums = network.run(lambda r: reduce_scatter_pairwise(inputs[r].clone(), network.world(r, inside).levels))
    assert torch.equal(torch.stack(sums), add_neighbors(inputs))


def test_ranks_of_several_nodes_exchange_with_those_of_equal_local_rank_only(monkeypatch):
    network = ThreadNetwork(8)
    monkeypatch.setattr(reduction, "dist", network)
    network.run(lambda r: reduce_scatter_pairwise(torch.ones(8, 6), network.world(r, 4).levels))
    size = 4 * 8 * 6
    for rank, called in enumerate(network.called):
        node, peers = range(4) if rank < 4 else range(4, 8), range(rank % 4, 8, 4)
        assert called == [("all-to-all", node, size), ("all-to-all", peers, size // 4)]
    flat_network = ThreadNetwork(6)
    monkeypatch.setattr(reduction, "dist", flat_network)
    flat_network.run(lambda r: reduce_scatter_pairwise(torch.ones(6, 6), flat_network.world(r, 3).levels))
    assert {call for called in flat_network.called for call in called} == {("all-to-all", range(6), 4 * 6 * 6)}


def test_no_view_of_a_gradient_is_created_if_a_process_has_one_logical_rank(monkeypatch):
    monkeypatch.setattr(reduction, "gradients_in", lambda *_: pytest.fail("there is nothing to add"))
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.ones(4)
    hook = FixedOrderAllReduce([parameter], TreeSum(), fake_world(0, 3))
    monkeypatch.setattr(hook, "exchange", lambda buffer, *_, **__: buffer)
    assert torch.equal(hook.average(Bucket([0], [parameter], True)), torch.ones(4))


@pytest.mark.parametrize(("inside", "most"), [(None, 3), (2, 5)])
def test_as_many_buckets_are_received_at_the_same_time_as_the_plan_assumes(monkeypatch, inside, most):
    network = ThreadNetwork(4)
    for module in (reduction, collectives):
        monkeypatch.setattr(module, "dist", network)
    sizes = []

    def work(rank: int) -> None:
        hook = FixedOrderAllReduce([], TreeSum(), network.world(rank, inside))
        futures = [hook.exchange(torch.ones(8), is_last=number == 9, divisor=4) for number in range(10)]
        assert all(torch.equal(future.wait(), torch.ones(8)) for future in futures)
        sizes.append(len({buffer.data_ptr() for buffer in hook.free}))

    network.run(work)
    levels = len(network.world(0, inside).levels)
    assert sizes == [most] * 4 == [buckets_in_flight(levels, on_gpus=False)] * 4
    assert buckets_in_flight(levels, on_gpus=True) == 1
