"""DDP as a strategy: unused parameters are found in the first step, and state is gathered on rank 0."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from worlds import fake_world

from app.errors import RunError
from app.settings import Settings
from app.strategies.ddp import DDP


def test_a_parameter_without_a_gradient_is_an_error_in_the_first_step():
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    model["used"](torch.ones(1, 2)).sum().backward()
    with pytest.raises(RunError, match=r"2 of the model's parameters, such as unused\.weight, take no part"):
        DDP(Settings(), fake_world()).clip_grad_norm(model, 1.0)
    searching = Settings(ddp_find_unused_parameters=True)
    assert DDP(searching, fake_world()).clip_grad_norm(model, 1.0) > 0


def test_gradients_are_checked_only_once():
    """Later steps may leave out parameters only if DDP is set to find them, which it checks itself."""
    model, strategy = nn.Linear(2, 2), DDP(Settings(), fake_world())
    model(torch.ones(1, 2)).sum().backward()
    strategy.clip_grad_norm(model, 1.0)
    model.zero_grad()
    strategy.clip_grad_norm(model, 1.0)


def test_state_is_gathered_on_rank_0_only():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    assert DDP(Settings(), fake_world(0, 2)).gather_model_state(model).keys() == model.state_dict().keys()
    assert DDP(Settings(), fake_world(1, 2)).gather_model_state(model) == {}
    assert DDP(Settings(), fake_world(0, 2)).gather_optimizer_state(optimizer) == optimizer.state_dict()
    assert DDP(Settings(), fake_world(1, 2)).gather_optimizer_state(optimizer) == {}


def test_preparing_a_resume_leaves_no_gradients():
    class Model(nn.Linear):
        def forward(self, x: torch.Tensor):
            return type("Output", (), {"loss": super().forward(x).sum()})

    model = Model(2, 2)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    DDP(Settings(), fake_world()).prepare_resume(model, {"x": torch.ones(1, 2)})
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
