"""A step whose gradient norm is not finite changes nothing, without the host waiting for the norm."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.worlds import batch_plan, fake_world
from torch import nn

from app.settings import Settings
from app.strategies.ddp import DDPStrategy
from app.training.step import build_optimizer, skip_step_if_nonfinite


def training(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 2)).to(dtype)
    settings = Settings(learning_rate=1e-2)
    return model, build_optimizer(model, settings, strategy=DDPStrategy(settings, batch_plan(), fake_world()))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, guarded: bool, factor: float = 1.0) -> None:
    dtype = next(model.parameters()).dtype
    (model(torch.ones(3, 5, dtype=dtype)).square().sum() * factor).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if guarded:
        skip_step_if_nonfinite(optimizer, norm)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite_steps_are_bitwise_identical_to_unguarded_steps(dtype):
    plain, guarded = training(dtype), training(dtype)
    for _ in range(4):
        step(*plain, guarded=False)
        step(*guarded, guarded=True)
    for a, b in zip(plain[0].parameters(), guarded[0].parameters(), strict=True):
        assert torch.equal(a, b)
    states = [optimizer.state_dict()["state"] for _, optimizer in (plain, guarded)]
    assert all(torch.equal(states[0][i][name], x) for i, values in states[1].items() for name, x in values.items())


def test_an_optimizer_without_parameters_and_one_on_another_device():
    parameter = torch.zeros(2, device="meta")
    for groups in ([{"params": [parameter]}], [{"params": []}, {"params": [parameter]}]):
        optimizer = torch.optim.AdamW(groups)
        skip_step_if_nonfinite(optimizer, torch.tensor(1.0))
        assert optimizer.found_inf.device == parameter.device
    optimizer.param_groups = [{"params": []}]
    skip_step_if_nonfinite(optimizer, torch.tensor(float("inf")))
    assert optimizer.found_inf == 1


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_neither_weights_nor_moments(factor):
    model, optimizer = training()
    step(model, optimizer, guarded=True)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    step(model, optimizer, guarded=True, factor=factor)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    for i, values in optimizer.state_dict()["state"].items():
        assert all(torch.equal(state["state"][i][name], value) for name, value in values.items())
    step(model, optimizer, guarded=True)
    assert not all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
