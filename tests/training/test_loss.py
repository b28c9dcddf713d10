"""The training loss: micro-batches together have the loss of one large batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.common.errors import UserError
from app.data.batches import BatchPlan, FullBatchSampler, plan_batches
from app.settings import Settings
from app.training.loss import WeightedLoss, build_loss, class_weights


def plan_of(logical_ranks: int, accumulation: int, micro_size: int, rows: int) -> BatchPlan:
    size = logical_ranks * accumulation * micro_size
    settings = Settings(train_batch_size=size, logical_ranks=logical_ranks, gradient_accumulation_steps=accumulation)
    return plan_batches(settings, rows, 1)


@given(
    shape=st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 4)),
    n=st.integers(48, 150),
    weights=st.lists(st.floats(0.01, 100), min_size=3, max_size=3),
    smoothing=st.floats(0, 0.9),
    seed=st.integers(0, 2**31),
    group=st.booleans(),
)
def test_the_mean_over_micro_batches_is_the_loss_of_one_large_batch(shape, n, weights, smoothing, seed, group):
    plan = plan_of(*shape, n)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (n,), generator=generator)
    logits = torch.randn(n, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    lengths = torch.randint(1, 9, (n,), generator=generator).numpy()

    def sampler(logical_ranks: list[int]) -> FullBatchSampler:
        return FullBatchSampler(lengths, plan, logical_ranks=logical_ranks, seed=seed % 99, group_by_length=group)

    loss = WeightedLoss(np.array(weights), labels.numpy(), sampler([0]), smoothing=smoothing)
    one_large_batch = torch.nn.CrossEntropyLoss(torch.tensor(weights, dtype=torch.float64), label_smoothing=smoothing)
    batches = sampler([*range(plan.logical_ranks)])
    for step in (0, 1, plan.steps_per_epoch, plan.steps_per_epoch - 1):  # a resumed run starts anywhere
        epoch, step_of_epoch = divmod(step, plan.steps_per_epoch)
        batches.set_epoch(epoch)
        rows = batches.epoch_rows()[step_of_epoch]
        micro_losses = [
            loss(SimpleNamespace(logits=logits[micro]), labels[micro], step) for micro in rows.split(plan.micro_size)
        ]
        found, expected = torch.stack(micro_losses).mean(), one_large_batch(logits[rows], labels[rows])
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        gradients = [torch.autograd.grad(value, logits)[0] for value in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-13)


def test_logits_of_16_bits_have_a_loss_of_32_bits():
    labels = torch.tensor([0, 1, 2, 0])
    sampler = FullBatchSampler(np.ones(4, dtype=np.int64), plan_of(1, 1, 4, 4), logical_ranks=[0], seed=0)
    loss = WeightedLoss(np.ones(3), labels.numpy(), sampler, smoothing=0.1)
    logits = torch.zeros(4, 3, dtype=torch.bfloat16)
    found = loss(SimpleNamespace(logits=logits), labels, 0)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(np.log(3), rel=1e-6)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"class_weights": "balanced"}, [3 / 4, 3 / 2]),
        ({"class_weights": "1,2.5"}, [1, 2.5]),
        ({"label_smoothing_factor": 0.1}, [1, 1]),
    ],
)
def test_weights_are_balanced_over_training_rows_or_given(flags, expected):
    table = SimpleNamespace(labels=np.array([0, 0, 1, 1, 1, 1]), class_names=("a", "b"))
    data: Any = SimpleNamespace(table=table, split=SimpleNamespace(train=np.arange(3)), train_sampler=lambda *_: None)
    loss = build_loss(Settings(**flags), data)
    assert isinstance(loss, WeightedLoss)
    assert loss.weights.tolist() == expected


def test_weights_of_a_class_without_training_rows_cannot_be_balanced():
    with pytest.raises(UserError, match="--class_weights balanced: a class has no training rows: give the weights"):
        class_weights("balanced", np.array([0, 2]), ["a", "b", "c"])
