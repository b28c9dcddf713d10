"""The formulas for the memory of each strategy. tests/bench/test_benchmarks.py compares them with measured memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.worlds import batch_plan
from torch import nn

from app.distributed.world import Topology
from app.plan.empty_model import MicroBatch
from app.plan.memory import RankMemory, gathered_after_forward, plan_memory
from app.plan.step import Plan
from app.settings import SHARDED, STRATEGIES, WRAPPED_IN_DDP, Settings


class Block(nn.ParameterList):
    pass


class Shapes(nn.Module):
    """A model of which only the shapes of the parameters count. The first ones are blocks of one parameter each."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32, blocks: int = 0) -> None:
        super().__init__()
        self._no_split_modules = ["Block"]
        self.config = SimpleNamespace(num_hidden_layers=blocks)
        weights = [nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape in shapes]
        self.blocks = nn.ModuleList(Block([weight]) for weight in weights[:blocks])
        self.weights = nn.ParameterList(weights[blocks:])


def plan_of(
    model: Any, strategy: str, topology: Topology, *, per_rank: int = 1, accumulation: int = 1, **changes: Any
) -> Plan:
    """A plan in which each rank has some logical ranks. `changes` are settings, or fields of the plan."""
    order = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Plan(
        device=changes.pop("device", torch.device("cpu")),
        cpu_offload=changes.pop("cpu_offload", False),
        settings=Settings(strategy=strategy, **changes),
        strategy=strategy,
        model=model,
        order=order,
        batches=batch_plan(topology.ranks, per_rank * topology.ranks, accumulation),
        topology=topology,
        run=lambda *_: MicroBatch(model, order, 0, 0),
    )


MODEL = Shapes([(10, 4), (6, 4), (2, 4), (4,), (2,)])
ELEMENTS = 40 + 24 + 8 + 4 + 2
BLOCKS = Shapes([(8, 4), (5, 2), (6, 4), (2, 4), (3,)], blocks=3)  # 77 elements, of which the last two are no block


def memory_of(
    model: nn.Module, strategy: str, ranks: int = 2, *, inside: int | None = None, **more: Any
) -> list[RankMemory]:
    """The memory of each rank."""
    return plan_memory(plan_of(model, strategy, Topology(ranks, inside or ranks), **more))


def test_the_state_of_a_small_model_is_as_counted_by_hand():
    # zero1: rank 0 updates 10 x 4; rank 1 updates 6 x 4, 2 x 4, the 4 and the 2.
    # With 4 ranks, rows are divided 3, 3, 3, 1 of 10; 2, 2, 2, 0 of 6; 1, 1, 0, 0 of 2; one each of 4; 1, 1, 0, 0 of 2.
    # The moments have these sizes. Parameters and gradients are padded to rank 0's.
    shards = [12 + 8 + 4 + 1 + 1, 12 + 8 + 4 + 1 + 1, 12 + 8 + 0 + 1 + 0, 4 + 0 + 0 + 1 + 0]
    of_ranks = {"ddp": [16 * ELEMENTS] * 2, "zero1": [8 * ELEMENTS + 8 * 40, 8 * ELEMENTS + 8 * 38]}
    of_ranks |= {strategy: [8 * shards[0] + 8 * shard for shard in shards] for strategy in SHARDED}
    for strategy, sizes in of_ranks.items():
        assert [memory.state for memory in memory_of(MODEL, strategy, len(sizes))] == sizes
    assert [memory.state for memory in memory_of(Shapes([(4, 4)], torch.float64), "zero3")] == [4 * 8 * 8] * 2


def test_frozen_parameters_have_neither_gradients_nor_moments():
    model = Shapes([(4, 4), (2, 4)])
    model.weights[0].requires_grad_(False)
    assert memory_of(model, "ddp", 1) == [RankMemory(4 * 24, 4 * 8, 8 * 8)]
    shard, other = memory_of(model, "zero3")
    assert shard == other
    assert (shard.parameters, shard.gradients, shard.optimizer) == (4 * 12, 4 * 4, 8 * 4)


# ---- what a step needs besides them ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype", "width", "exchange", "sums"),
    [
        # The gradients of the largest block, the copy that FSDP2 makes in fp32, its rounded copy, and what is received.
        ("fp32", "fp32", 4, 4 + 4 + 4, 4),
        ("bf16", "fp32", 2, 2 + 4 + 4, 4),
        ("fp32", "bf16", 4, 4 + 4 + 2 + 2, 2),
        ("bf16", "bf16", 2, 2 + 4 + 2 + 2, 2),
    ],
)
def test_a_sharded_strategy_gathers_all_parameters_or_some_blocks(param_dtype, reduce_dtype, width, exchange, sums):
    dtypes = {"precision": "bf16", "param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
    # ZeRO-3 gathers the two largest blocks, and the rest, which alone remains after the forward pass.
    for strategy, gathered, remaining in (("zero2", 77, 77), ("zero3", 32 + 24 + 8 + 3, 8 + 3)):
        plan = plan_of(BLOCKS, strategy, Topology(2, 2), per_rank=2, **dtypes)
        memory = plan_memory(plan)[0]
        assert (memory.gathered, gathered_after_forward(plan)) == (width * gathered, width * remaining)
        assert (memory.exchange, memory.partial_sums) == (exchange * 32, sums * memory.gradients // 4)
        assert memory.state == memory_of(BLOCKS, strategy)[0].state, "shards stay in fp32"
    assert gathered_after_forward(plan_of(BLOCKS, "zero1", Topology(2, 2))) == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_of_logical_ranks_and_micro_batches_add_up_beside_the_others(strategy):
    plain = memory_of(MODEL, strategy)[0]
    assert (plain.partial_sums, plain.accumulated) == (0, 0)
    for per_rank, partial_sums in {2: 1, 4: 2, 8: 3}.items():
        memory = memory_of(MODEL, strategy, per_rank=per_rank)[0]
        assert (memory.partial_sums, memory.accumulated) == (partial_sums * plain.gradients, 0)
    both = memory_of(MODEL, strategy, per_rank=2, accumulation=2)[0]
    assert (both.partial_sums, both.accumulated) == (plain.gradients, 4 * ELEMENTS)
    assert both.on_device == both.state + both.gathered + both.exchange + both.accumulated + both.partial_sums


@pytest.mark.parametrize("strategy", WRAPPED_IN_DDP)
def test_three_ranks_receive_buckets_of_the_others(strategy):
    assert memory_of(MODEL, strategy, 2)[0].exchange == 0
    assert memory_of(MODEL, strategy, 3)[0].exchange == 4 * ELEMENTS, "no more than all gradients"
    two_mib = Shapes([(512, 1024)] * 9)
    for inside, device, buckets in ((4, "cpu", 3), (2, "cpu", 5), (2, "cuda", 1)):
        memory = memory_of(two_mib, strategy, 4, inside=inside, device=torch.device(device), ddp_bucket_cap_mb=1)[0]
        assert memory.exchange == buckets * 2 * 2**20


@pytest.mark.parametrize("strategy", WRAPPED_IN_DDP)
def test_compressed_gradients_need_memory(strategy):
    model = Shapes([(10, 4), (6, 4)])  # 64 elements
    for hook, size in {"no": 0, "fp16": 2 * 64, "bf16": 2 * 64, "power_sgd": 12 * 64}.items():
        assert {memory.exchange for memory in memory_of(model, strategy, ddp_comm_hook=hook)} == {size}
    plain, bf16 = (memory_of(model, strategy, 4, per_rank=2, ddp_comm_hook=hook)[0] for hook in ("no", "bf16"))
    assert (plain.exchange, plain.partial_sums) == (4 * 64, 4 * 64)
    assert (bf16.exchange, bf16.partial_sums) == (2 * 64 + 2 * 64, 2 * 64)
