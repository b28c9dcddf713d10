"""DeepSpeed's engine, as far as it can be tested without DeepSpeed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers.jobs import require_deepspeed
from helpers.worlds import batch_plan, fake_world

from app.settings import Settings
from app.trainer.deepspeed_engine import DeepSpeed, move_buffers


@pytest.mark.parametrize("stage", [1, 2])
def test_the_complete_model_is_placed_on_the_device_when_the_engine_is_about_to_be_created(stage):
    require_deepspeed()
    strategy, model = DeepSpeed(Settings(), batch_plan(), fake_world(device="meta")), torch.nn.Linear(2, 2)
    assert strategy.wrap(model) is model
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}, "weights may be loaded now"
    strategy.place({"zero_optimization": {"stage": stage}})
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert len(strategy.hooks) == 2


def test_shared_buffers_stay_shared():
    model = torch.nn.Sequential(torch.nn.Module(), torch.nn.Module())
    shared = torch.zeros(2)
    for module in model:
        module.register_buffer("shared", shared)
    model[1].register_buffer("absent", None)
    model[1].register_buffer("not_saved", torch.ones(3), persistent=False)
    move_buffers(model, torch.device("meta"))
    assert model[0].shared is model[1].shared
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
    assert model[1].absent is None
    assert set(model.state_dict()) == {"0.shared", "1.shared"}


@pytest.mark.parametrize("norm", [torch.tensor(3.0, dtype=torch.float64, device="meta"), float("inf"), 2])
def test_the_norm_is_on_the_device_even_after_an_overflow(norm):
    """In that case DeepSpeed returns a Python float. Norms of several steps are stacked, so all are on one device."""
    engine = SimpleNamespace(get_global_grad_norm=lambda: norm)
    strategy = DeepSpeed(Settings(), batch_plan(), fake_world(device="meta"))
    strategy.model = torch.nn.Module()  # `wrap` needs DeepSpeed
    found = strategy.clip_grad_norm(engine, 1.0, torch.ones(()))  # type: ignore[arg-type]
    assert (found.device.type, found.dtype, found.shape) == ("meta", torch.float32, ())
