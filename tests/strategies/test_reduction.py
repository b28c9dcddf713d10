"""Gradients are added as one binary tree over the logical ranks, at every number of processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, product

import numpy as np
import pytest
import torch
from helpers.worlds import batch_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies.gradients import Bucket, add_neighbors, flat
from strategies.thread_network import ThreadNetwork

from app.distributed import collectives
from app.strategies import compression, reduction
from app.strategies.compression import HOOK_DTYPES, RoundedAllReduce
from app.strategies.optimization import loss_factor
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


def sum_of_process(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add the gradients of a process's logical ranks as the strategies do."""
    sums = TreeSum()
    for leaf in leaves[:-1]:
        sums.add([leaf.clone()])
    last = leaves[-1].clone()
    sums.add_to_last_leaf([last], [0])
    return last


@pytest.mark.parametrize(("logical_ranks", "ranks"), LAYOUTS)
@settings(max_examples=20)
@given(seed=SEEDS)
def test_the_sum_has_the_same_bits_at_every_number_of_processes(logical_ranks, ranks, seed):
    plan, leaves = batch_plan(ranks, logical_ranks), [flat(leaf) for leaf in gradients(seed, logical_ranks)]
    expected = add_neighbors(leaves)
    # Each process adds its own logical ranks first, as DDP does.
    own = [[leaves[i] for i in plan.logical_ranks_of(rank)] for rank in range(ranks)]
    assert torch.equal(sum_pairwise(torch.stack([*map(sum_of_process, own)])), expected)
    # The processes add the n-th logical ranks of all of them first, as a sharded strategy does.
    own = [[leaves[i] for i in plan.logical_ranks_of(rank, interleaved=True)] for rank in range(ranks)]
    across = [sum_pairwise(torch.stack(nth)) for nth in zip(*own, strict=True)]
    assert torch.equal(sum_of_process(across), expected)


@pytest.mark.parametrize("logical_ranks", [4, 8, 16])
def test_any_other_order_of_the_additions_has_other_bits(logical_ranks):
    """Otherwise the test above could not fail."""
    leaves = [flat(leaf) for leaf in gradients(1, logical_ranks, [(200,)])]
    tree = add_neighbors(leaves)
    assert not torch.equal(sum(leaves), tree)
    for first, second in ((1, 2), (0, logical_ranks - 1)):
        swapped = leaves.copy()
        swapped[first], swapped[second] = swapped[second], swapped[first]
        assert not torch.equal(add_neighbors(swapped), tree)


@given(seed=SEEDS, n=st.integers(1, 33))
def test_an_unpaired_last_row_is_carried_to_the_next_level(seed, n):
    """Without --logical_ranks, the number of ranks need not be a power of two."""
    rows = [flat(leaf) for leaf in gradients(seed, n)]
    assert torch.equal(sum_pairwise(torch.stack(rows)), add_neighbors(rows))


def test_only_the_partial_sums_of_complete_subtrees_are_held():
    sums = TreeSum()
    for n, leaf in enumerate(gradients(0, 32), start=1):
        sums.add(leaf)
        assert [level for level, _ in sums.partial_sums] == [bit for bit in range(5, -1, -1) if n >> bit & 1]


# ---- across processes, which are threads here ------------------------------------------------------------------------

FEW = [(1, 8, None), (2, 8, None), (2, 2, None)]  # ranks, logical ranks, ranks of each node
ONE_LEVEL = [(3, None, None), (4, 4, None), (4, 16, None), (5, None, None), (8, 8, None), (8, 8, 1), (6, None, 3)]
TWO_LEVELS = [(4, 4, 2), (4, 16, 2), (6, None, 2), (8, 8, 4), (12, None, 4)]
BUCKETS = [[[3, 2, 1, 0]], [[3], [2], [1], [0], [4], [5]], [[0, 1], [3, 2]]]  # of parameters


@pytest.fixture
def network_of(monkeypatch) -> Callable[[int], ThreadNetwork]:
    """A function that connects a number of threads by what `app` uses of torch.distributed."""

    def connect(ranks: int) -> ThreadNetwork:
        network = ThreadNetwork(ranks)
        for module in (compression, reduction, collectives):
            monkeypatch.setattr(module, "dist", network)
        monkeypatch.setattr(reduction, "all_gather_single", network.all_gather_single)
        return network

    return connect


@pytest.mark.parametrize("buckets", BUCKETS)
@pytest.mark.parametrize(
    ("hook_name", "precision", "layout"),
    [
        *product(["no"], ["fp32"], [*ONE_LEVEL, *TWO_LEVELS]),  # with fewer ranks, it is DDP's own all-reduce
        *product(HOOK_DTYPES, ["fp32", "fp16"], [*FEW, *ONE_LEVEL, *TWO_LEVELS]),
    ],
)
def test_the_communication_hook_averages_every_bucket_in_the_order_of_the_tree(
    network_of, hook_name, precision, layout, buckets
):
    """With fp16 and bf16, the gradient of each logical rank is divided and rounded, and so is each sum in the tree."""
    ranks, logical_ranks, inside = layout
    plan, dtype = batch_plan(ranks, logical_ranks), HOOK_DTYPES.get(hook_name)
    # Most buckets do not divide evenly among 3, 4, 5, 6, 8 or 12 ranks.
    shapes = [(7,), (2, 3), (1,), (30,), (25,), (26,)][: max(map(max, buckets)) + 1]
    leaves = gradients(3, plan.logical_ranks, shapes)
    # The loss is divided by the number of the process's logical ranks. The loss scale of fp16 contains this factor.
    factor = loss_factor(precision, plan)
    share = plan.logical_ranks_per_rank / factor
    network = network_of(ranks)

    def work(rank: int) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        world, sums = network.world(rank, inside), TreeSum()
        hook = FixedOrderAllReduce(parameters, sums, world)
        if dtype is not None:
            hook = RoundedAllReduce(parameters, sums, world=world, dtype=dtype, factor=factor)
        averages = []
        for _ in range(2):  # steps
            *others, last = ([tensor / share for tensor in leaves[i]] for i in plan.logical_ranks_of(rank))
            for leaf in others:
                hook.add(leaf)
            for parameter, gradient in zip(parameters, last, strict=True):
                parameter.grad = gradient
            filled = [Bucket(indices, parameters, indices is buckets[-1]) for indices in buckets]
            futures = [hook.average(bucket) for bucket in filled]
            sums.clear()
            assert all(future.done() for future in futures), "DDP waits for them after the last bucket"
            assert all(torch.equal(future.value(), b.buffer()) for future, b in zip(futures, filled, strict=True))
            by_index = {i: g for b in filled for i, g in zip(b.indices, b.gradients(), strict=True)}
            averages.append(flat([by_index[i] for i in range(len(shapes))]))
        return averages

    whole = [flat(leaf) for leaf in leaves]
    expected = add_neighbors(whole) / plan.logical_ranks
    if dtype is not None:
        rounded = add_neighbors([(leaf / plan.logical_ranks).to(dtype) for leaf in whole]).float()
        assert not torch.equal(rounded, expected)
        expected = rounded * factor
    for average in chain(*network.run(work)):
        assert torch.equal(average, expected)


@pytest.mark.parametrize(("ranks", "inside"), [(8, 4), (6, 3)])
def test_ranks_of_several_nodes_exchange_with_those_of_equal_local_rank_only(network_of, ranks, inside):
    """But 3 ranks of each node exchange with all: the tree has neighbors on two nodes."""
    network = network_of(ranks)
    network.run(lambda r: reduce_scatter_pairwise(torch.ones(ranks, 6), network.world(r, inside).levels))
    size = 4 * ranks * 6
    for rank, called in enumerate(network.called):
        node, peers = range(4) if rank < 4 else range(4, 8), range(rank % 4, 8, 4)
        two_levels = [("all-to-all", node, size), ("all-to-all", peers, size // 4)]
        assert called == (two_levels if inside == 4 else [("all-to-all", range(6), size)])


@pytest.mark.parametrize(("inside", "most"), [(None, 3), (2, 5)])
def test_as_many_buckets_are_received_at_the_same_time_as_the_plan_assumes(network_of, inside, most):
    network = network_of(4)

    def work(rank: int) -> int:
        hook = FixedOrderAllReduce([], TreeSum(), network.world(rank, inside))
        futures = [hook.exchange(torch.ones(8), is_last=number == 9, divisor=4) for number in range(10)]
        assert all(torch.equal(future.wait(), torch.ones(8)) for future in futures)
        return len({buffer.data_ptr() for buffer in hook.free})

    levels = len(network.world(0, inside).levels)
    assert network.run(work) == [most] * 4 == [buckets_in_flight(levels, on_gpus=False)] * 4
    assert buckets_in_flight(levels, on_gpus=True) == 1
