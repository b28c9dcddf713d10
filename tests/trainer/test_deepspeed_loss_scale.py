"""The loss scale of DeepSpeed's fp16 section, as the engine applies it and as a checkpoint keeps it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.jobs import require_deepspeed
from helpers.worlds import batch_plan, fake_world

from app.strategies.optimization import LossScale
from app.trainer.deepspeed_loss_scale import DeepSpeedLossScale

SECTION = {
    **{"loss_scale": 0, "initial_scale_power": 10, "loss_scale_window": 3, "hysteresis": 2},
    **{"consecutive_hysteresis": False, "min_loss_scale": 1},
}
FINITE, OVERFLOW = torch.tensor(2.0), torch.tensor(float("inf"))


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    """DeepSpeed asks for the rank before it logs an overflow."""
    require_deepspeed()
    from deepspeed import comm

    monkeypatch.setattr(comm, "get_rank", lambda *_: 0)


def loss_scale(**changes: Any) -> DeepSpeedLossScale:
    zero = SimpleNamespace(
        loss_scaler=SimpleNamespace(cur_scale=1.0), torch_autocast_gradscaler="PyTorch's", overflow=False
    )
    return DeepSpeedLossScale(SimpleNamespace(optimizer=zero), SECTION | changes)


def scales(of: DeepSpeedLossScale, norms: list[torch.Tensor]) -> list[float]:
    """The scale that the engine applies after each of several steps."""
    found = []
    for norm in norms:
        of.zero.overflow = bool(torch.isinf(norm))
        of.update(norm)
        assert of.zero.overflow is False, "the schedule advances"
        found.append(of.zero.loss_scaler.cur_scale)
    return found


def test_the_second_overflow_halves_the_scale_and_steps_without_one_double_it():
    scale = loss_scale()
    assert scale.zero.torch_autocast_gradscaler is None
    assert scale.zero.loss_scaler.cur_scale == 1024, "before the first step"
    assert scales(scale, [OVERFLOW, OVERFLOW, OVERFLOW, *[FINITE] * 4]) == [1024, 512, 256, 256, 256, 256, 512]
    assert scale.scale(torch.tensor(3.0)) == 3, "the engine scales the loss itself"


def test_a_fixed_scale_stays():
    assert scales(loss_scale(loss_scale=128.0), [OVERFLOW, FINITE, OVERFLOW]) == [128] * 3


@pytest.mark.parametrize("done", range(12))
def test_a_restored_scale_goes_on_as_if_the_run_had_not_stopped(done):
    norms = [FINITE, OVERFLOW, FINITE, FINITE, OVERFLOW, *[FINITE] * 7, OVERFLOW, FINITE]
    complete, stopped, restored = loss_scale(), loss_scale(), loss_scale()
    expected = scales(complete, norms)
    assert len(set(expected)) > 2
    scales(stopped, norms[:done])
    restored.load_state_dict(stopped.state_dict())
    assert scales(restored, norms[done:]) == expected[done:]


def test_other_strategies_continue_with_the_scale_and_the_other_way_round():
    plain, scale = LossScale("fp16", batch_plan(), fake_world()), loss_scale()
    scales(scale, [OVERFLOW, OVERFLOW, FINITE])
    plain.load_state_dict(scale.state_dict())
    assert plain.state_dict() == {"value": 512.0, "good_steps": 1}
    other = loss_scale()
    other.load_state_dict(plain.state_dict())
    assert scales(other, [OVERFLOW]) == [512], "DeepSpeed tolerates the first overflow"
