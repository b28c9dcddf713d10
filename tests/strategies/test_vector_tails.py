"""AdamW updates an element to the same bits wherever in a tensor it is, so shards are updated as the whole would be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.strategies import vector_tails
from app.strategies.vector_tails import VectorTails

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


def test_on_a_gpu_nothing_is_computed(monkeypatch):
    """Its kernels update every element in the same way, and the host is the limit."""
    monkeypatch.setattr(vector_tails, "tail_of", lambda tensor: pytest.fail("a tail is looked for"))
    parameter = torch.nn.Parameter(torch.zeros(3, device="meta"))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW([parameter])
    VectorTails(optimizer)
    for _ in range(2):
        optimizer.step()
