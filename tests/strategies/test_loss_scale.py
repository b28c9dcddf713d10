"""Loss scaling for fp16."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.worlds import fake_world
from hypothesis import given
from hypothesis import strategies as st

from app.data.sampler import plan_batches
from app.settings import Settings
from app.strategies import loss_scale
from app.strategies.loss_scale import LossScale


def build(precision: str = "fp16", logical_ranks: int = 1) -> LossScale:
    settings = Settings(precision=precision, logical_ranks=logical_ranks)  # type: ignore[arg-type]
    return LossScale(settings.precision, plan_batches(settings, 100, 1), fake_world())


@given(st.lists(st.booleans(), max_size=30))
def test_it_changes_like_grad_scaler(overflows):
    interval = 3
    theirs = torch.amp.GradScaler("cpu", growth_interval=interval)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_scale, "GROWTH_INTERVAL", interval)
        ours = build()
        for overflow in overflows:
            assert float(ours.value) == theirs.get_scale()
            (parameter,) = optimizer.param_groups[0]["params"]
            parameter.grad = torch.tensor([math.inf if overflow else 1.0])
            theirs.scale(torch.zeros(()))
            theirs.step(optimizer)
            theirs.update()
            ours.update(torch.tensor(math.inf if overflow else 1.0))
    assert float(ours.value) == theirs.get_scale()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_other_precisions_are_not_scaled(precision):
    scale = build(precision)
    loss = torch.ones(())
    assert scale.scale(loss) is loss
    scale.update(torch.tensor(math.nan))
    assert float(scale.value) == 1


def test_its_state_does_not_depend_on_the_number_of_processes():
    many, one = build(logical_ranks=4), build()
    assert float(many.value) == 4 * float(one.value)
    assert many.state_dict() == one.state_dict()
    one.update(torch.tensor(math.inf))
    many.load_state_dict(one.state_dict())
    assert float(many.value) == 4 * float(one.value)
    assert many.state_dict() == one.state_dict()
