"""The predicted collectives of a training step are those that it calls, with the same number of bytes.

A step runs on one of several ranks, without the others: nothing is sent. tests/launched/test_commands.py starts real
ranks.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.architectures import CONFIGS, SMALL
from helpers.worlds import batch_plan, process_group_of
from plan.test_memory import Shapes, plan_of
from transformers import AutoModelForSequenceClassification, BertConfig, DistilBertConfig, MixtralConfig

from app.bench.steps import Bench
from app.bench.traffic import as_counts, count_third_step
from app.distributed.world import Topology
from app.model.dropout import checkpoint_activations
from app.model.load import training_dtype
from app.plan.step import plan_step
from app.plan.traffic import ALL, BETWEEN, INSIDE, Collective, plan_traffic
from app.settings import SHARDED, STRATEGIES, WRAPPED_IN_DDP, Settings
from app.training.build import select_strategy

CPU = torch.device("cpu")
LENGTH = 8
MODELS = CONFIGS | {
    # Dimensions that no number of ranks divides, and gradients of more than 1 MiB.
    "uneven": BertConfig(hidden_size=33, num_hidden_layers=2, num_attention_heads=3, intermediate_size=3001),
    # Fills buckets of 25 MiB.
    "large": BertConfig(hidden_size=33, num_hidden_layers=2, num_attention_heads=3, intermediate_size=120_001),
    "frozen": DistilBertConfig(dim=32, n_layers=2, n_heads=2, hidden_dim=32, sinusoidal_pos_embds=True),
    "mixtral": MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2),
}
# Beside that one: tied weights, parameters without a gradient, one that is not trained, a mixture of experts, buffers.
FAST = ("uneven", "large", "bart", "xlnet", "frozen", "mixtral", "batch_norm")
FP32_PARTS = ("fnet", "batch_norm")  # compute with parameters in fp32 on purpose
PARAM_BF16 = {"precision": "bf16", "param_dtype": "bf16"}
FSDP_BF16 = PARAM_BF16 | {"reduce_dtype": "bf16"}
# Steps of "uneven" under each strategy. By default, all ranks are on one node, and each is a logical rank.
LAYOUTS: list[dict[str, Any]] = [
    {"ranks": 4, "logical_ranks": 8},
    {"ranks": 1, "logical_ranks": 4, "accumulation": 2},
    {"ranks": 3, "accumulation": 2, "precision": "bf16", "activation_checkpointing": True},
    {"ranks": 64, "precision": "fp64"},
    *({"ranks": ranks, "inside": inside} for ranks, inside in ((6, 3), (4, 2), (12, 4))),
]
DTYPES = (FSDP_BF16, PARAM_BF16, {"reduce_dtype": "bf16"}, {"precision": "fp64", "reduce_dtype": "bf16"})
OF_SHARDED = [{"ranks": 4, "logical_ranks": 8, "accumulation": 2} | dtypes for dtypes in DTYPES]
OF_WRAPPED: list[dict[str, Any]] = [
    # Buckets of another size, in another order.
    {"ranks": 3, "accumulation": 2, "ddp_bucket_cap_mb": 1},
    {"ranks": 3, "accumulation": 2, "ddp_bucket_cap_mb": 1, "ddp_find_unused_parameters": True},
    *({"ranks": ranks, "ddp_comm_hook": "fp16"} for ranks in (1, 2, 3)),
    {"ranks": 16, "inside": 8, "ddp_comm_hook": "bf16"},
    # PowerSGD uses the results of its collectives: tests/launched/test_commands.py starts two ranks.
    {"ranks": 1, "ddp_comm_hook": "power_sgd"},
]
STEPS = [(name, strategy, {"ranks": 4}) for name in MODELS for strategy in STRATEGIES]
STEPS += [(name, "zero3", {"ranks": 3, "accumulation": 2} | FSDP_BF16) for name in MODELS if name not in FP32_PARTS]
for strategies, layouts in ((STRATEGIES, LAYOUTS), (SHARDED, OF_SHARDED), (WRAPPED_IN_DDP, OF_WRAPPED)):
    STEPS += [("uneven", strategy, layout) for strategy in strategies for layout in layouts]
# Buffers have the dtype of training.
STEPS += [(name, "ddp", {"ranks": 3, "precision": "fp64"}) for name in ("qwen2", "batch_norm")]


def is_fast(name: str, strategy: str, layout: dict[str, Any]) -> bool:
    """Whether a step is one of a few that show what the others show, too: zero1 sums as ddp, and zero2 as zero3."""
    return name in FAST and (strategy in ("ddp", "zero3") or (name, layout) == ("uneven", {"ranks": 4}))


def counts(
    name: str, strategy_name: str, ranks: int, logical_ranks=None, accumulation=1, inside=None, **changes: Any
) -> list[Any]:
    """Return how often a step calls each collective: as predicted, and as counted."""
    config = copy.deepcopy(MODELS[name])
    config.vocab_size, config.pad_token_id, config.eos_token_id = 1_009, 0, 3
    changes = {"ddp_find_unused_parameters": name == "xlnet", "strategy": strategy_name} | changes
    settings = Settings(use_cpu=True, max_length=LENGTH, gradient_accumulation_steps=accumulation, **changes)
    batches, topology = batch_plan(ranks, logical_ranks, accumulation), Topology(ranks, inside or ranks)
    predicted = plan_traffic(plan_step(settings, copy.deepcopy(config), batches, device=CPU, topology=topology))

    model = AutoModelForSequenceClassification.from_config(config).to(training_dtype(settings.precision))
    if settings.activation_checkpointing:
        checkpoint_activations(model)
    ids = torch.full((2, LENGTH), 7)
    ids[:, -1] = 3  # BART and T5 classify the hidden state of the end-of-sequence token
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros(2, dtype=torch.int64)}
    loader, data = [batch] * (3 * batches.micro_batches_per_step), SimpleNamespace(plan=batches)
    with process_group_of(ranks - 1, ranks, inside) as world:
        strategy = select_strategy(settings, batches, world)
        bench = Bench(settings, world, data, strategy, model, strategy.wrap(model), loader)
        return [as_counts(predicted), count_third_step(bench)]


@pytest.mark.parametrize(
    ("name", "strategy", "layout"),
    [pytest.param(*step, marks=[] if is_fast(*step) else pytest.mark.slow) for step in STEPS],
)
def test_the_collectives_of_a_step_are_those_that_were_predicted(name, strategy, layout):
    predicted, counted = counts(name, strategy, **layout)
    assert counted == predicted


# ---- how many bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "among", "sent", "leaving"),
    [
        ("all-to-all", ALL, 50, 3 * 3 * 10),  # three ranks of a node send three chunks of 10 each
        ("all-gather", ALL, 50, 50),  # one rank sends all but one chunk to the next node
        ("all-reduce", ALL, 100, 100),
        ("broadcast", ALL, 50, 30),  # on average over the ranks and nodes: one node receives it from the other one
        ("all-to-all", INSIDE, 40, 0),
        ("all-to-all", BETWEEN, 30, 3 * 30),
    ],
)
def test_the_bytes_that_a_rank_sends_and_that_leave_a_node_are_as_counted_by_hand(operation, among, sent, leaving):
    collective, topology = Collective("", "", operation, 60, times=2, among=among), Topology(6, 3)
    assert (collective.sent(topology), collective.leaving(topology)) == (2 * sent, 2 * leaving)
    assert collective.leaving(Topology(6, 6)) == 0


def test_gpus_gather_averages_in_one_collective():
    on_cpus, on_gpus = (
        plan_traffic(plan_of(Shapes([(10, 4)]), "ddp", Topology(4, 4), device=torch.device(name)))[-1]
        for name in ("cpu", "cuda")
    )
    assert on_cpus == Collective("gradients", "bucket 1", "broadcast", 40, times=4)
    assert on_gpus == Collective("gradients", "bucket 1", "all-gather", 160)
