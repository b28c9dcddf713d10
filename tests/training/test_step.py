"""Parameter groups, warmup and schedule."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.worlds import batch_plan, fake_world
from transformers import BertConfig, BertForSequenceClassification

from app.settings import Settings
from app.strategies.ddp import DDPStrategy
from app.training.step import build_optimizer, build_scheduler, skip_step_if_nonfinite, warmup_steps


def test_weight_decay_applies_to_matrices_but_not_to_biases_and_norms():
    model = BertForSequenceClassification(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    settings = Settings(weight_decay=0.1)
    optimizer = build_optimizer(model, settings, strategy=DDPStrategy(settings, batch_plan(), fake_world()))
    decayed, kept = (group["params"] for group in optimizer.param_groups)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)] for p in kept} == {n for n in names.values() if n.endswith("bias") or "LayerNorm" in n}
    assert len(decayed) + len(kept) == len(names)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert all(group["fused"] for group in optimizer.param_groups)


@pytest.mark.parametrize(("requested", "steps"), [(0, 0), (0.1, 10), (0.105, 11), (1, 1), (25, 25)])
def test_warmup_is_a_number_of_steps_or_a_share_of_all_steps(requested, steps):
    assert warmup_steps(requested, 100) == steps


def test_the_learning_rate_rises_to_its_peak_and_falls_to_zero():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build_scheduler(optimizer, Settings(warmup_steps=10), 110)
    rates = []
    for _ in range(110):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates[0] == 0.0
    assert rates[10] == max(rates) == 1.0
    assert rates[60] == pytest.approx(0.5)
    assert scheduler.get_last_lr()[0] == pytest.approx(0.0)


@pytest.mark.parametrize(("norm", "changes"), [(1.0, True), (math.inf, False), (math.nan, False)])
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing(norm, changes):
    model, settings = torch.nn.Linear(4, 4), Settings()
    optimizer = build_optimizer(model, settings, strategy=DDPStrategy(settings, batch_plan(), fake_world()))
    before = model.weight.clone()
    model(torch.ones(1, 4)).sum().backward()
    skip_step_if_nonfinite(optimizer, torch.tensor(norm))
    optimizer.step()
    assert torch.equal(model.weight, before) != changes
