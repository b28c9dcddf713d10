"""Loss scaling for fp16, and AdamW, which updates an element to the same bits wherever in a tensor it is."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.worlds import fake_world
from hypothesis import given, settings
from hypothesis import strategies as st

from app.data.sampler import plan_batches
from app.settings import Settings
from app.strategies import optimization
from app.strategies.optimization import LossScale, VectorTails


def build(precision: str = "fp16", logical_ranks: int = 1) -> LossScale:
    settings = Settings(precision=precision, logical_ranks=logical_ranks)  # type: ignore[arg-type]
    return LossScale(settings.precision, plan_batches(settings, 100, 1), fake_world())


@given(st.lists(st.booleans(), max_size=30))
def test_it_changes_like_grad_scaler(overflows):
    interval = 3
    theirs = torch.amp.GradScaler("cpu", growth_interval=interval)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimization, "GROWTH_INTERVAL", interval)
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


STEPS = 12


def train(values: torch.Tensor, gradients: torch.Tensor, corrected: bool = True) -> torch.Tensor:
    """Return the parameter and its moments after some steps, stacked. Step 3 is skipped, and step 5 has no gradient."""
    parameter, aligned = torch.nn.Parameter(values.clone()), torch.nn.Parameter(torch.ones(64, dtype=values.dtype))
    optimizer = torch.optim.AdamW([parameter, aligned], lr=1e-2, weight_decay=0.1, fused=True)
    if corrected:
        VectorTails(optimizer)
    for step, gradient in enumerate(gradients):
        parameter.grad = None if step == 5 else gradient.clone()
        aligned.grad = torch.ones_like(aligned)
        optimizer.found_inf = torch.tensor(float(step == 3))
        optimizer.step()
    state = optimizer.state[parameter]
    return torch.stack([parameter.detach(), state["exp_avg"], state["exp_avg_sq"]])


def new_tensors(n: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, generator=generator, dtype=dtype)
    scale = 10 ** torch.empty(STEPS, n, dtype=dtype).uniform_(-4, 2, generator=generator)
    return values, torch.randn(STEPS, n, generator=generator, dtype=dtype) * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=40)
@given(n=st.integers(1, 200), shards=st.integers(1, 8), seed=st.integers(0, 2**32 - 1))
def test_shards_of_any_length_are_updated_as_the_whole(dtype, n, shards, seed):
    values, gradients = new_tensors(n, seed, dtype)
    whole = train(values, gradients)
    chunks = gradients.chunk(shards, dim=1)
    parts = [train(part, chunk) for part, chunk in zip(values.chunk(shards), chunks, strict=True)]
    assert torch.equal(torch.cat(parts, dim=1), whole)


def test_elements_that_fill_vectors_are_updated_by_adamw_itself():
    values, gradients = new_tensors(999, 0)
    plain, corrected = train(values, gradients, corrected=False), train(values, gradients)
    assert torch.equal(plain[:, :992], corrected[:, :992])
    assert torch.allclose(plain, corrected, rtol=1e-6)


@pytest.mark.parametrize("tensor", [torch.zeros(3, device="meta"), torch.zeros(3, 5).t()])
def test_a_tensor_on_another_device_and_a_transposed_one_are_left_alone(tensor):
    parameter = torch.nn.Parameter(tensor)
    parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW([parameter])
    tails = VectorTails(optimizer)
    tails.update(optimizer)
    assert tails.updated == []
