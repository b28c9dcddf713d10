"""Every strategy trains to the same bits. Here with one process; tests/launched has several."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from helpers.architectures import CONFIGS
from helpers.worlds import batch_plan, fake_world
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from app.data.sampler import BatchPlan
from app.ddp_loop import train_step
from app.model.dropout import RowDropout
from app.settings import Settings
from app.strategies.base import Strategy
from app.strategies.ddp import DDPStrategy, Zero1Strategy
from app.strategies.fsdp import FullyShardStrategy, ShardedModel, wrapper_name
from app.strategies.optimization import LossScale, Optimization
from app.training.build import select_strategy
from app.training.step import build_optimizer, build_scheduler

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
STEPS = 2


@pytest.mark.parametrize(
    ("name", "kind", "shards_optimizer", "logical_ranks"),
    [
        ("ddp", DDPStrategy, False, [2, 3]),
        ("zero1", Zero1Strategy, True, [2, 3]),
        ("zero2", FullyShardStrategy, True, [1, 3]),
        ("zero3", FullyShardStrategy, True, [1, 3]),
    ],
)
def test_each_name_selects_its_strategy(name, kind, shards_optimizer, logical_ranks):
    strategy = select_strategy(Settings(strategy=name), batch_plan(2, 4), fake_world(1, 2))
    assert type(strategy) is kind
    assert strategy.name == name
    assert strategy.shards_optimizer is shards_optimizer
    assert list(strategy.logical_ranks) == logical_ranks


@dataclass
class Outcome:
    """What a run of a few steps leaves behind; everything of it has to be bitwise identical."""

    losses: list[torch.Tensor]
    norms: list[torch.Tensor]
    weights: dict[str, torch.Tensor]
    evaluations: list[torch.Tensor]


def new_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS["bart" if name == "deep_bart" else name])
    if name == "deep_bart":
        config.decoder_layers = 3
    config.vocab_size, config.pad_token_id = 50, 5
    return AutoModelForSequenceClassification.from_config(config)


def new_batches(plan: BatchPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids (steps, micro-batches, rows, tokens) and labels (steps, micro-batches, rows) of one process."""
    shape = (STEPS, plan.micro_batches_per_step, plan.micro_size)
    labels = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(1))
    ids = torch.randint(6, 50, (*shape, 7), generator=torch.Generator().manual_seed(2))
    ids[..., -1] = 2  # BART classifies the end-of-sequence token
    return ids, labels


def train(strategy_name: str, world, logical_ranks: int, accumulation: int, name: str, **changes) -> Outcome:
    """Train for some steps, with an evaluation after each one."""
    fixed: dict[str, Any] = {"learning_rate": 1e-2, "warmup_steps": 0, "dropout": 0.1}
    settings = Settings(strategy=strategy_name, gradient_accumulation_steps=accumulation, **fixed | changes)
    plan = batch_plan(1, logical_ranks, accumulation)
    strategy: Strategy = select_strategy(settings, plan, world)
    model = new_model(name)
    wrapped = strategy.wrap(model)
    is_sharded = strategy_name in ("zero2", "zero3")
    assert type(wrapped) is (ShardedModel if is_sharded else DistributedDataParallel)
    fsdp_class = f"FSDP{type(new_model(name)).__name__}"
    assert wrapper_name(wrapped) == (fsdp_class if is_sharded else "DistributedDataParallel")
    optimizer = build_optimizer(wrapped, settings, strategy=strategy)
    scheduler = build_scheduler(optimizer, settings, plan.total_steps)
    optimization = Optimization(optimizer, scheduler, LossScale(settings.precision, plan, world))
    ids, labels = new_batches(plan)
    found = Outcome([], [], {}, [])
    for step in range(STEPS):
        batches = [{"input_ids": i, "labels": j} for i, j in zip(ids[step], labels[step], strict=True)]
        losses, norm = train_step(
            wrapped, batches, step, optimization=optimization, strategy=strategy, settings=settings
        )
        assert losses.shape == (plan.micro_batches_per_step,)
        assert norm.shape == ()
        found.losses.append(losses)
        found.norms.append(norm)
        with torch.no_grad():
            found.evaluations.append(model.eval()(input_ids=ids[0, 0]).logits)
    found.weights = strategy.gather_model_state(model)
    plain = new_model(name).eval()
    plain.load_state_dict(found.weights)
    assert torch.equal(plain(input_ids=ids[0, 0]).logits, found.evaluations[-1]), "the gathered state is not the model"
    return found


@pytest.mark.parametrize(
    ("logical_ranks", "accumulation", "name", "changes"),
    [
        (4, 1, "bert", {"max_grad_norm": 0.01}),
        (2, 2, "gpt2", {"precision": "bf16"}),
        (2, 1, "bert", {"precision": "fp16"}),
        (2, 1, "bart", {}),  # with tied embeddings
        (1, 1, "deep_bart", {}),  # several blocks use the encoder's output
        (1, 1, "batch_norm", {}),  # with buffers
    ],
)
def test_every_strategy_trains_to_the_same_bits(world, logical_ranks, accumulation, name, changes):
    expected = train("ddp", world, logical_ranks, accumulation, name, **changes)
    for strategy in STRATEGIES[1:]:
        found = train(strategy, world, logical_ranks, accumulation, name, **changes)
        for attribute in ("losses", "norms", "evaluations"):
            pairs = zip(getattr(found, attribute), getattr(expected, attribute), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), f"{attribute} of {strategy}"
        assert found.weights.keys() == expected.weights.keys()
        for key, value in expected.weights.items():
            assert found.weights[key].dtype == value.dtype
            assert torch.equal(found.weights[key], value), f"{key} of {strategy}"


def test_the_losses_are_those_of_the_micro_batches_of_each_logical_rank(world):
    """Each row has the dropout masks of its position in the global batch."""
    plan, model = batch_plan(1, 2, 2), new_model("bert").train()
    ids, labels = new_batches(plan)
    expected = []
    for number, place in enumerate(product(range(2), range(2))):
        with RowDropout(Settings().seed, 0, plan.rows_of(*place)):
            expected.append(model(input_ids=ids[0, number], labels=labels[0, number]).loss.item())
    assert train("ddp", world, 2, 2, "bert").losses[0].tolist() == expected


@pytest.mark.parametrize("flags", [{"strategy": "zero2"}, {"strategy": "zero3"}])
def test_a_sharded_model_is_never_placed_on_the_device_as_a_whole(world, monkeypatch, flags):
    """It may not fit there: `fully_shard` moves one block at a time."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the complete model is moved")

    model, complete = new_model("bert"), new_model("bert")
    monkeypatch.setattr(PreTrainedModel, "to", refuse)
    select_strategy(Settings(**flags), batch_plan(), world).wrap(model)
    with pytest.raises(AssertionError, match="moved"):
        select_strategy(Settings(), batch_plan(), world).wrap(complete)
