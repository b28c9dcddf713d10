"""Code that the strategies share: norms summed in fp64, and clipping."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from app.strategies.base import CHUNK, clip_by_norm, sum_of_squares


def values(seed: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    draw = np.random.default_rng(seed)
    return torch.tensor(draw.normal(size=n) * 10 ** draw.uniform(-6, 2, size=n), dtype=dtype)


SEEDS, LENGTHS = st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@settings(max_examples=20)
@given(seed=SEEDS, lengths=st.lists(LENGTHS, max_size=5))
def test_squares_are_summed_in_fp64(dtype, seed, lengths):
    """So the norm does not depend on how gradients are sharded."""
    tensors = [values(seed + i, n, dtype) for i, n in enumerate(lengths)]
    found = sum_of_squares(tensors)
    assert found.dtype == torch.float64
    assert found.shape == ()
    assert found.item() == pytest.approx(sum(float(x.double().square().sum()) for x in tensors), rel=1e-12, abs=0)


MAX_NORMS = st.sampled_from([1e-9, 0.5, 1.0, 100.0, 1e9, float("inf")])


@given(seed=SEEDS, max_norm=MAX_NORMS, exponent=st.integers(-8, 24))
def test_clipping_is_that_of_torch_and_a_loss_scale_rounds_nothing(seed, max_norm, exponent):
    before = [values(seed, 40).view(5, 8), values(seed + 1, 9)]
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in before]
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = gradient.clone()
    expected_norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    norm = sum_of_squares(before).sqrt().float()
    rounding = 25 * torch.finfo(torch.float32).eps  # of torch's sum of 49 squares, in whichever order its kernel adds
    assert norm == pytest.approx(float(expected_norm), rel=rounding)
    plain, scaled = ([gradient * factor for gradient in before] for factor in (1, 2.0**exponent))
    clip_by_norm(plain, norm, max_norm, loss_scale=torch.ones(()))
    clip_by_norm(scaled, norm, max_norm, loss_scale=torch.tensor(2.0**exponent))
    assert all(map(torch.equal, scaled, plain))
    for parameter, gradient in zip(parameters, plain, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=rounding, atol=0)
    if norm < 0.99 * max_norm:
        assert all(map(torch.equal, plain, before)), "a norm below the limit changes nothing"
    clip_by_norm([], norm, max_norm, loss_scale=torch.ones(()))  # a rank may hold no row of any gradient
