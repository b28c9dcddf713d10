"""DeepSpeed's engine, as far as it can be tested without DeepSpeed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from jobs import require_deepspeed
from worlds import batch_plan, fake_world

from app.settings import Settings
from app.strategies.deepspeed_engine import DeepSpeed


def test_the_model_is_on_the_device_before_hooks_and_the_optimizer_get_its_parameters():
    require_deepspeed()
    model = torch.nn.Linear(2, 2)
    assert DeepSpeed(Settings(), batch_plan(), fake_world(device="meta")).wrap(model) is model
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize("norm", [torch.tensor(3.0, dtype=torch.float64, device="meta"), float("inf"), 2])
def test_the_norm_is_on_the_device_even_after_an_overflow(norm):
    """In that case DeepSpeed returns a Python float. Norms of several steps are stacked, so all are on one device."""
    engine = SimpleNamespace(get_global_grad_norm=lambda: norm)
    strategy = DeepSpeed(Settings(), batch_plan(), fake_world(device="meta"))
    strategy.model = torch.nn.Module()  # `wrap` needs DeepSpeed
    found = strategy.clip_grad_norm(engine, 1.0, torch.ones(()))  # type: ignore[arg-type]
    assert (found.device.type, found.dtype, found.shape) == ("meta", torch.float32, ())
