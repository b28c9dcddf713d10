"""Parameter groups, the schedule, and a step whose gradient norm is not finite, which changes nothing."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from helpers.worlds import batch_plan, fake_world
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from app.settings import Settings
from app.strategies.ddp import DDPStrategy
from app.training.step import build_optimizer, build_scheduler, skip_step_if_nonfinite


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    settings = Settings(learning_rate=1e-2, weight_decay=0.1)
    return build_optimizer(model, settings, strategy=DDPStrategy(settings, batch_plan(), fake_world()))


def test_weight_decay_applies_to_matrices_but_not_to_biases_and_norms():
    model = BertForSequenceClassification(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    optimizer = optimizer_of(model)
    decayed, kept = (group["params"] for group in optimizer.param_groups)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)] for p in kept} == {n for n in names.values() if n.endswith("bias") or "LayerNorm" in n}
    assert len(decayed) + len(kept) == len(names)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


@pytest.mark.parametrize(("requested", "steps"), [(0, 0), (0.1, 11), (0.105, 12), (1, 1), (25, 25)])
def test_the_learning_rate_rises_over_a_number_or_share_of_steps_and_falls_to_zero(requested, steps):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build_scheduler(optimizer, Settings(warmup_steps=requested), 110)
    rates = []
    for _ in range(111):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    falling = [1 - i / (110 - steps) for i in range(111 - steps)]
    assert rates == pytest.approx([*(i / steps for i in range(steps)), *falling])


def train(*factors: float) -> list[list[torch.Tensor]]:
    """Train a step for each factor of the loss. Return the weights and the optimizer's state after each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 2))
    optimizer, found = optimizer_of(model), []
    for factor in factors:
        optimizer.zero_grad()
        (model(torch.ones(3, 5)).square().sum() * factor).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        skip_step_if_nonfinite(optimizer, norm)
        optimizer.step()
        states = [optimizer.state[parameter].values() for parameter in model.parameters()]
        found.append(copy.deepcopy([*model.state_dict().values(), *(value for state in states for value in state)]))
    return found


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_neither_weights_nor_moments(factor):
    before, skipped, after = train(1, factor, 1)
    assert all(map(torch.equal, skipped, before))
    assert not any(map(torch.equal, after, before)), "the next step is trained"


def test_an_optimizer_without_parameters_and_one_on_another_device():
    """With ZeRO-1, a rank may update none. With --cpu_offload, the optimizer runs on the CPU."""
    parameter = torch.zeros(2, device="meta")
    optimizer = torch.optim.AdamW([{"params": []}, {"params": [parameter]}])
    skip_step_if_nonfinite(optimizer, torch.tensor(1.0))
    assert optimizer.found_inf.device == parameter.device
    optimizer.param_groups = [{"params": []}]
    skip_step_if_nonfinite(optimizer, torch.tensor(math.inf))
    assert optimizer.found_inf == 1
