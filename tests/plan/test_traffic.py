"""The predicted collectives of a training step are those that it calls, with the same number of bytes.

A step runs on one of several ranks, without the others: nothing is sent. tests/launched/test_commands.py starts real
ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.architectures import CONFIGS, SMALL
from helpers.worlds import batch_plan, process_group_of
from hypothesis import given
from hypothesis import strategies as st
from plan.plans import Shapes, plan_of
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    JambaConfig,
    MixtralConfig,
    PreTrainedConfig,
    RoFormerConfig,
)

from app.bench.steps import Bench
from app.bench.traffic import as_counts, count_third_step
from app.distributed.world import Topology
from app.model.dropout import checkpoint_activations
from app.model.precision import training_dtype
from app.plan.step import plan_step
from app.plan.traffic import BETWEEN, INSIDE, Collective, gradient_buckets, plan_traffic
from app.settings import SHARDED, STRATEGIES, WRAPPED_IN_DDP, Settings
from app.training.build import select_strategy

CPU = torch.device("cpu")
LENGTH = 8
MODELS: dict[str, PreTrainedConfig] = CONFIGS | {
    # Dimensions that no number of ranks divides, and gradients of more than 1 MiB.
    "uneven": BertConfig(hidden_size=33, num_hidden_layers=2, num_attention_heads=3, intermediate_size=3001),
    "frozen": DistilBertConfig(dim=32, n_layers=2, n_heads=2, hidden_dim=32, sinusoidal_pos_embds=True),
    "roformer": RoFormerConfig(**SMALL, embedding_size=32),  # its position embeddings are not trained either
    "mixtral": MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2),
    "jamba": JambaConfig(**SMALL, num_key_value_heads=1, num_experts=4, attn_layer_period=2, attn_layer_offset=1),
}
# Tied weights, parameters without a gradient, one that is not trained, and a mixture of experts.
FAST = ("bart", "xlnet", "frozen", "mixtral")
FP32_PARTS = ("fnet", "batch_norm")  # compute with parameters in fp32 on purpose
PARAM_BF16 = {"precision": "bf16", "param_dtype": "bf16"}
FSDP_BF16 = PARAM_BF16 | {"reduce_dtype": "bf16"}
RANKS = [(4, 8, 1), (3, 3, 2), (1, 4, 2), (64, 64, 1)]  # ranks, logical ranks and micro-batches of each
NODES = [(6, 3), (4, 2), (12, 4), (16, 8)]  # ranks, and those on each node
CHANGES = [{"precision": "bf16"}, {"activation_checkpointing": True}, {"precision": "fp64"}]
DTYPES = [FSDP_BF16, PARAM_BF16, {"reduce_dtype": "bf16"}, {"precision": "fp64", "reduce_dtype": "bf16"}]
# PowerSGD uses the results of its collectives, so it needs all ranks: tests/launched/test_commands.py starts two.
HOOKS = [("fp16", 1, "ddp"), ("fp16", 2, "zero1"), ("fp16", 3, "ddp"), ("bf16", 3, "zero1"), ("power_sgd", 1, "ddp")]


@dataclass(frozen=True)
class Step:
    """A training step of a model of `MODELS`. By default, all ranks are on one node, and each is a logical rank."""

    name: str
    strategy: str
    ranks: int
    logical_ranks: int | None = None
    accumulation: int = 1
    changes: dict[str, Any] = field(default_factory=dict)  # more settings
    inside: int | None = None  # ranks on each node


def steps() -> Iterator[tuple[Step, bool]]:
    """Yield steps, and whether they are among the fast tests."""
    for name in MODELS:
        for strategy in STRATEGIES:
            yield Step(name, strategy, 4), name in FAST
        if name not in FP32_PARTS:
            yield Step(name, "zero3", 3, accumulation=2, changes=FSDP_BF16), name in FAST
    for strategy in STRATEGIES:
        for i, shape in enumerate(RANKS):
            yield Step("uneven", strategy, *shape), i < 2
        for i, (ranks, inside) in enumerate(NODES):
            yield Step("uneven", strategy, ranks, inside=inside), i < 1
        for i, changes in enumerate(CHANGES):
            yield Step("uneven", strategy, 3, accumulation=2, changes=changes), i < 2
    for strategy in SHARDED:
        for i, changes in enumerate(DTYPES):
            yield Step("uneven", strategy, 4, 8, 2, changes), i < 1
    for strategy in WRAPPED_IN_DDP:
        yield Step("uneven", strategy, 16, changes={"ddp_comm_hook": "bf16"}, inside=8), False
        for find_unused in (False, True):  # buckets of another size, in another order
            buckets = {"ddp_bucket_cap_mb": 1, "ddp_find_unused_parameters": find_unused}
            yield Step("uneven", strategy, 3, accumulation=2, changes=buckets), True
    for hook, ranks, strategy in HOOKS:
        yield Step("uneven", strategy, ranks, changes={"ddp_comm_hook": hook}), True
    for name in ("qwen2", "batch_norm"):  # buffers have the dtype of training
        yield Step(name, "ddp", 3, changes={"precision": "fp64"}), True


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(step, marks=[] if is_fast else pytest.mark.slow, id=f"{step.name}-{step.strategy}-{number}")
        for number, (step, is_fast) in enumerate(steps())
    ],
)
def test_the_collectives_of_a_step_are_those_that_were_predicted(step):
    config = copy.deepcopy(MODELS[step.name])
    config.vocab_size, config.pad_token_id, config.eos_token_id = 1_009, 0, 3
    changes = {"ddp_find_unused_parameters": step.name == "xlnet", "strategy": step.strategy} | step.changes
    settings = Settings(use_cpu=True, max_length=LENGTH, gradient_accumulation_steps=step.accumulation, **changes)
    batches = batch_plan(step.ranks, step.logical_ranks, step.accumulation)
    topology = Topology(step.ranks, step.inside or step.ranks)
    predicted = plan_traffic(plan_step(settings, copy.deepcopy(config), batches, device=CPU, topology=topology))

    model = AutoModelForSequenceClassification.from_config(config).to(training_dtype(settings.precision))
    if settings.activation_checkpointing:
        checkpoint_activations(model)
    ids = torch.full((2, LENGTH), 7)
    ids[:, -1] = 3  # BART and T5 classify the hidden state of the end-of-sequence token
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros(2, dtype=torch.int64)}
    loader, data = [batch] * (3 * batches.micro_batches_per_step), SimpleNamespace(plan=batches)
    with process_group_of(step.ranks - 1, step.ranks, step.inside) as world:
        strategy = select_strategy(settings, batches, world)
        bench = Bench(settings, world, data, strategy, model, strategy.wrap(model), loader)
        assert count_third_step(bench) == as_counts(predicted)


# ---- how many bytes -------------------------------------------------------------------------------------------------


def sent(model: Shapes, strategy: str, ranks: int, *, inside: int | None = None, **more: Any) -> tuple[float, float]:
    """The bytes that a rank sends, and those that leave a node, without those of the norm."""
    topology = Topology(ranks, inside or ranks)
    planned = [one for one in plan_traffic(plan_of(model, strategy, topology, **more)) if one.purpose != "norm"]
    return sum(one.sent(topology) for one in planned), sum(one.leaving(topology) for one in planned)


def test_the_bytes_of_a_small_model_are_as_counted_by_hand():
    model = Shapes([(10, 4), (6, 4)])  # 256 bytes
    with_block = Shapes([(10, 4), (6, 4)], blocks=1)  # 192 bytes are gathered twice, and 128 bytes once
    assert sent(model, "ddp", 1) == (0, 0)
    assert sent(model, "ddp", 2) == (256, 0), "each rank sends half of the gradients, and half of the averages"
    assert sent(model, "ddp", 4)[0] == pytest.approx(2 * 3 / 4 * 256)
    # Rank 0 updates 160 bytes and rank 1 updates 96: together they send all of them once.
    assert sent(model, "zero1", 2)[0] == 256 + 128
    # Rows are padded to 12 and 8: 320 bytes.
    for one, strategy in ((model, "zero2"), (model, "zero3"), (with_block, "zero2")):
        assert sent(one, strategy, 4)[0] == pytest.approx(2 * 3 / 4 * 320)
    assert sent(with_block, "zero3", 4)[0] == pytest.approx(3 / 4 * (320 + 2 * 192 + 128))
    several, _ = sent(with_block, "zero3", 4, per_rank=2, accumulation=3)
    assert several == pytest.approx(3 / 4 * (2 * 320 + 2 * 3 * (2 * 192 + 128)))


def test_the_bytes_that_leave_a_node_are_as_counted_by_hand():
    topology = Topology(6, 3)
    assert Collective("", "", "all-to-all", 60).leaving(topology) == 3 * 3 * 10, "three ranks, three chunks of 10"
    assert Collective("", "", "all-gather", 60).leaving(topology) == 50, "one rank sends all but one chunk"
    assert Collective("", "", "all-reduce", 60).leaving(topology) == 100
    assert Collective("", "", "broadcast", 60).leaving(topology) == 30, "the other node receives it from the root's"
    assert Collective("", "", "all-to-all", 60, among=INSIDE).leaving(topology) == 0
    assert Collective("", "", "all-to-all", 60, times=2, among=BETWEEN).leaving(topology) == 2 * 3 * 30
    # In one level, as 3 ranks are no subtree. 4 P of 1 x 36 numbers: an all-to-all, 6 broadcasts of a sixth.
    assert sent(Shapes([(6, 6)]), "ddp", 6, inside=3)[1] == 1.5 * 144 + 0.5 * 144


@pytest.mark.parametrize(("nodes", "inside"), [(2, 2), (3, 4), (8, 8)])
def test_no_more_bytes_leave_a_node_than_with_a_ring(nodes, inside):
    ranks = nodes * inside
    model = Shapes([(ranks, 2 * ranks)])  # can be divided among the ranks
    ring = (nodes - 1) / nodes * 4 * 2 * ranks**2
    of_rank, of_node = sent(model, "ddp", ranks, inside=inside)
    assert of_node == pytest.approx(2 * ring)
    assert of_rank == pytest.approx(sent(model, "ddp", ranks)[0]), "as on one node"


def test_gpus_gather_averages_in_one_collective():
    on_cpus, on_gpus = (
        plan_traffic(plan_of(Shapes([(10, 4)]), "ddp", Topology(4, 4), device=torch.device(name)))[-1]
        for name in ("cpu", "cuda")
    )
    assert on_cpus == Collective("gradients", "bucket 1", "broadcast", 40, times=4)
    assert on_gpus == Collective("gradients", "bucket 1", "all-gather", 160)


@given(st.lists(st.integers(1, 400_000), min_size=1, max_size=30), st.sampled_from([None, 1, 2]), st.booleans())
def test_buckets_hold_each_gradient_once_and_end_when_they_are_full(sizes, cap, find_unused):
    model = Shapes([(size,) for size in sizes])
    flags = {"ddp_bucket_cap_mb": cap, "ddp_find_unused_parameters": find_unused}
    buckets = gradient_buckets(plan_of(model, "ddp", Topology(2, 2), **flags))
    together = [id(parameter) for bucket in buckets for parameter in bucket]
    assert sorted(together) == sorted(map(id, model.parameters()))
    limits = [(cap or 1) * 2**20, (cap or 25) * 2**20]
    filled = buckets[::-1] if find_unused else buckets
    for number, bucket in enumerate(filled):
        limit = limits[min(number, 1)]
        *before, last = [4 * parameter.numel() for parameter in bucket]
        assert sum(before) < limit
        assert number == len(filled) - 1 or sum(before) + last >= limit
