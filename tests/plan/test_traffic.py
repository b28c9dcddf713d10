"""The predicted collectives of a training step are those that it calls, with the same number of bytes.

A step runs on one of several ranks, without the others: nothing is sent. tests/launched/test_commands.py starts real
ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.marks import slow_after
from helpers.worlds import process_group_of
from hypothesis import given
from hypothesis import strategies as st
from plan.plans import Shapes, plan_of
from plan.steps import MODELS, Step
from torch import nn

from app.bench.traffic import Counts
from app.distributed.world import Topology
from app.plan.traffic import BETWEEN, INSIDE, Collective, gradient_buckets, plan_traffic
from app.settings import SHARDED, STRATEGIES, WRAPPED_IN_DDP

# Tied weights, parameters without a gradient, one that is not trained, and a mixture of experts.
FAST = ("bart", "xlnet", "frozen", "mixtral")

# Not those that compute with parameters in fp32 on purpose.
BF16 = [name for name in MODELS if name not in ("fnet", "batch_norm")]
ALL = [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in MODELS]


def check(step: Step) -> None:
    with process_group_of(step.ranks - 1, step.ranks, step.inside) as world:
        assert step.count(world) == step.predict(), step


@pytest.mark.parametrize("name", ALL)
def test_any_architecture(name):
    for strategy in STRATEGIES:
        check(Step(name, strategy, ranks=4))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("ranks", "logical_ranks", "accumulation"), slow_after(2, [(4, 8, 1), (3, 3, 2), (1, 4, 2), (64, 64, 1)])
)
def test_any_number_of_ranks_logical_ranks_and_micro_batches(strategy, ranks, logical_ranks, accumulation):
    check(Step("uneven", strategy, ranks, logical_ranks, accumulation))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("ranks", "inside", "hook"), slow_after(1, [(6, 3, "no"), (4, 2, "no"), (12, 4, "no"), (16, 8, "bf16")])
)
def test_any_number_of_nodes(strategy, ranks, inside, hook):
    if hook == "no" or strategy in WRAPPED_IN_DDP:
        check(Step("uneven", strategy, ranks, changes={"ddp_comm_hook": hook}, inside=inside))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "changes",
    slow_after(
        2, [{"precision": "bf16"}, {"activation_checkpointing": True}, {"ddp_bucket_cap_mb": 1}, {"precision": "fp64"}]
    ),
    ids=str,
)
def test_any_settings(strategy, changes):
    check(Step("uneven", strategy, ranks=3, accumulation=2, changes=changes))


# PowerSGD uses the results of its collectives, so it needs all ranks: tests/launched/test_commands.py starts two.
@pytest.mark.parametrize(
    ("hook", "ranks", "strategy"),
    [("fp16", 1, "ddp"), ("fp16", 2, "zero1"), ("fp16", 3, "ddp"), ("bf16", 3, "zero1"), ("power_sgd", 1, "ddp")],
)
def test_compressed_gradients(hook, ranks, strategy):
    check(Step("uneven", strategy, ranks, changes={"ddp_comm_hook": hook}))


FSDP_BF16 = {"precision": "bf16", "param_dtype": "bf16", "reduce_dtype": "bf16"}


@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize(
    ("changes", "gathered", "exchanged"),
    slow_after(
        1,
        [
            (FSDP_BF16, 2, 2),
            ({"precision": "bf16", "param_dtype": "bf16"}, 2, 1),
            ({"reduce_dtype": "bf16"}, 1, 2),
            ({"precision": "fp64", "reduce_dtype": "bf16"}, 0.5, 2),
        ],
    ),
)
def test_gathered_parameters_and_reduced_gradients_in_bf16_have_half_the_bytes(strategy, changes, gathered, exchanged):
    step = Step("uneven", strategy, ranks=4, logical_ranks=8, accumulation=2, changes=changes)
    check(step)
    plain = Step("uneven", strategy, ranks=4, logical_ranks=8, accumulation=2).predict()

    def size(counts: Counts, operation: str) -> int:
        return sum(size * n for (kind, size, _), n in counts.items() if kind == operation)

    found = step.predict()
    assert size(plain, "all-gather") == gathered * size(found, "all-gather") > 0
    assert size(plain, "all-to-all") == exchanged * size(found, "all-to-all") > 0


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in BF16]
)
def test_any_architecture_in_bf16(name):
    check(Step(name, "zero3", ranks=3, logical_ranks=3, accumulation=2, changes=FSDP_BF16))


@pytest.mark.parametrize("name", ["qwen2", "batch_norm"])
def test_buffers_have_the_dtype_of_training(name):
    check(Step(name, "ddp", ranks=3, changes={"precision": "fp64"}))


def planned(model: nn.Module, strategy: str, topology: Topology, **more: Any) -> list[Collective]:
    collectives = plan_traffic(plan_of(model, strategy, topology, **more))
    return [collective for collective in collectives if collective.purpose != "norm"]


def sent(model: nn.Module, strategy: str, ranks: int, **more: Any) -> float:
    topology = Topology(ranks, ranks)
    return sum(collective.sent(topology) for collective in planned(model, strategy, topology, **more))


def leaving(model: nn.Module, strategy: str, ranks: int, inside: int) -> float:
    topology = Topology(ranks, inside)
    return sum(one.leaving(topology) for one in planned(model, strategy, topology) if one.purpose == "gradients")


def test_the_bytes_of_a_small_model_are_as_counted_by_hand():
    model = Shapes([(10, 4), (6, 4)])  # 256 bytes
    assert sent(model, "ddp", 1) == 0
    assert sent(model, "ddp", 2) == 256, "each rank sends half of the gradients, and half of the averages"
    assert sent(model, "ddp", 4) == pytest.approx(2 * 3 / 4 * 256)
    # Rank 0 updates 160 bytes and rank 1 updates 96: together they send all of them once.
    assert sent(model, "zero1", 2) == 256 + 128
    # Rows are padded to 12 and 8: 320 bytes.
    assert sent(model, "zero2", 4) == pytest.approx(2 * 3 / 4 * 320)
    assert sent(model, "zero3", 4) == sent(model, "zero2", 4), "there are no blocks"
    with_block = Shapes([(10, 4), (6, 4)], blocks=1)  # 192 bytes are gathered twice, and 128 bytes once
    assert sent(with_block, "zero2", 4) == pytest.approx(2 * 3 / 4 * 320)
    assert sent(with_block, "zero3", 4) == pytest.approx(3 / 4 * (320 + 2 * 192 + 128))
    assert sent(with_block, "zero3", 4, per_rank=2, accumulation=3) == pytest.approx(
        3 / 4 * (2 * 320 + 2 * 3 * (2 * 192 + 128))
    )


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6)), min_size=1, max_size=6), st.integers(2, 9))
def test_averaging_in_a_fixed_order_sends_as_much_as_a_ring(shapes, ranks):
    model = Shapes(shapes)
    size = 4 * sum(rows * columns for rows, columns in shapes)
    # The elements that can't be divided among the ranks are sent to all of them: fewer than one per rank.
    assert 2 * (ranks - 1) / ranks * size <= sent(model, "ddp", ranks) + 1e-6
    assert sent(model, "ddp", ranks) <= 2 * (ranks - 1) / ranks * size + 4 * ranks**2


@given(st.lists(st.integers(1, 400_000), min_size=1, max_size=30), st.sampled_from([None, 1, 2]), st.booleans())
def test_buckets_hold_each_gradient_once_and_end_when_they_are_full(sizes, cap, find_unused):
    model = Shapes([(size,) for size in sizes])
    order = list(model.parameters())[::-1]
    buckets = gradient_buckets(
        plan_of(
            *(model, "ddp", Topology(2, 2)), order=order, ddp_bucket_cap_mb=cap, ddp_find_unused_parameters=find_unused
        )
    )
    together = [parameter for bucket in buckets for parameter in bucket]
    assert {id(p) for p in together} == {id(p) for p in order}
    assert len(together) == len(order)
    limits = [2**20 if cap is None else cap * 2**20, 25 * 2**20 if cap is None else cap * 2**20]
    filled = buckets[::-1] if find_unused else buckets
    for number, bucket in enumerate(filled):
        limit = limits[min(number, 1)]
        *before, last = [4 * parameter.numel() for parameter in bucket]
        assert sum(before) < limit
        assert number == len(filled) - 1 or sum(before) + last >= limit


def test_gpus_gather_averages_in_one_collective():
    model = Shapes([(10, 4)])
    on_cpus, on_gpus = (planned(model, "ddp", Topology(4, 4), device=torch.device(name)) for name in ("cpu", "cuda"))
    assert on_cpus[-1] == Collective("gradients", "bucket 1", "broadcast", 40, times=4)
    assert on_gpus[-1] == Collective("gradients", "bucket 1", "all-gather", 160)
    assert on_cpus[-1].sent(Topology(4, 4)) == on_gpus[-1].sent(Topology(4, 4))


@pytest.mark.parametrize(("nodes", "inside"), [(2, 2), (2, 8), (3, 4), (8, 8)])
def test_no_more_bytes_leave_a_node_than_with_a_ring(nodes, inside):
    ranks = nodes * inside
    model = Shapes([(ranks, 2 * ranks)])  # can be divided among the ranks
    size = 4 * 2 * ranks**2
    assert leaving(model, "ddp", ranks, inside) == pytest.approx(2 * (nodes - 1) / nodes * size)
    assert leaving(model, "zero2", ranks, inside) == pytest.approx((nodes - 1) / nodes * size)
    assert sum(one.sent(Topology(ranks, inside)) for one in planned(model, "ddp", Topology(ranks, inside))) == (
        pytest.approx(sent(model, "ddp", ranks))
    ), "the ranks send as much as if they were on one node"


def test_the_bytes_that_leave_a_node_are_as_counted_by_hand():
    topology = Topology(6, 3)
    assert Collective("", "", "all-to-all", 60).leaving(topology) == 3 * 3 * 10, "three ranks, three chunks of 10"
    assert Collective("", "", "all-gather", 60).leaving(topology) == 50, "one rank sends all but one chunk"
    assert Collective("", "", "all-reduce", 60).leaving(topology) == 100
    assert Collective("", "", "broadcast", 60).leaving(topology) == 30, "the other node receives it from the root's"
    assert Collective("", "", "all-to-all", 60, among=INSIDE).leaving(topology) == 0
    assert Collective("", "", "all-to-all", 60, times=2, among=BETWEEN).leaving(topology) == 2 * 3 * 30
    assert not topology.two_levels, "3 ranks are no subtree"
    # 4 P of 1 x 36 numbers: an all-to-all, 6 broadcasts of a sixth.
    assert leaving(Shapes([(6, 6)]), "ddp", 6, 3) == 1.5 * 144 + 0.5 * 144
