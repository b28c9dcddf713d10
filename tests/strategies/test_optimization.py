"""Loss scaling for fp16, and AdamW, which updates an element to the same bits wherever in a tensor it is."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from helpers.worlds import batch_plan, fake_world
from hypothesis import given, settings
from hypothesis import strategies as st

from app.strategies import optimization
from app.strategies.optimization import LossScale, VectorTails, mean_loss


@pytest.mark.parametrize("precision", ["fp16", "fp32", "bf16"])
@given(overflows=st.lists(st.booleans(), max_size=30))
def test_it_changes_like_grad_scaler(precision, overflows):
    interval = 3
    theirs = torch.amp.GradScaler("cpu", growth_interval=interval, enabled=precision == "fp16")
    parameter, loss = torch.nn.Parameter(torch.ones(1)), torch.ones(())
    optimizer = torch.optim.SGD([parameter])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimization, "GROWTH_INTERVAL", interval)
        ours = LossScale(precision, batch_plan(), fake_world())
        for overflow in overflows:
            assert ours.scale(loss) == theirs.scale(loss)
            parameter.grad = torch.tensor([math.inf if overflow else 1.0])
            theirs.step(optimizer)
            theirs.update()
            ours.update(parameter.grad.squeeze())
    assert float(ours.value) == theirs.get_scale()


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
    whole, plain = train(values, gradients), train(values, gradients, corrected=False)
    chunks = gradients.chunk(shards, dim=1)
    parts = [train(part, chunk) for part, chunk in zip(values.chunk(shards), chunks, strict=True)]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    n_in_vectors = n - n % (64 // dtype.itemsize)
    assert torch.equal(plain[:, :n_in_vectors], whole[:, :n_in_vectors]), "AdamW itself updates them"
    torch.testing.assert_close(plain, whole, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("tensor", [torch.zeros(3, device="meta"), torch.zeros(3, 5).t()])
def test_a_tensor_on_another_device_and_a_transposed_one_are_left_alone(tensor):
    parameter = torch.nn.Parameter(tensor)
    parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW([parameter])
    tails = VectorTails(optimizer)
    tails.update(optimizer)
    assert tails.updated == []


@pytest.mark.parametrize("spread", [6e38, 1.0])
def test_an_infinite_loss_makes_all_gradients_nan_and_a_finite_loss_is_unchanged(spread):
    logits, labels = torch.tensor([[spread / 2, -spread / 2]], requires_grad=True), torch.tensor([1])
    expected = torch.nn.functional.cross_entropy(logits, labels)
    loss = mean_loss(SimpleNamespace(loss=expected), labels, 0)
    assert loss.equal(expected) == (spread == 1.0)
    loss.backward()
    assert logits.grad.isfinite().all() == (spread == 1.0)
