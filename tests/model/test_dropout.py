"""Dropout masks follow from the seed, the step, the row of the global batch, the call and the position alone."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from app.model.dropout import RowDropout, contexts_of_checkpointing, hash_integers, seed_generators

PLACES = st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 10**9), st.integers(0, 10**6))


def kept(rows: range, *shape: int, seed: int = 42, step: int = 0, p: float = 0.1, call: int = 0) -> torch.Tensor:
    """Return which elements of a tensor (rows, *shape) the dropout number `call` of a forward pass keeps."""
    with RowDropout(seed, step, rows):
        for _ in range(call):
            functional.dropout(torch.ones(len(rows), 1), p)
        return functional.dropout(torch.ones(len(rows), *shape), p) != 0


@given(
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    size=st.sampled_from([4, 8, 12]),
    parts=st.sampled_from([1, 2, 4]),
    interleaved=st.booleans(),
)
def test_a_row_has_the_same_masks_in_every_micro_batch(shape, size, parts, interleaved):
    whole = kept(range(size), *shape, p=0.5)
    n = size // parts
    for part in range(parts):
        rows = range(part, size, parts) if interleaved else range(part * n, (part + 1) * n)
        assert torch.equal(kept(rows, *shape, p=0.5), whole[list(rows)])


@given(n=st.integers(1, 40), padding=st.integers(0, 9), features=st.integers(1, 20))
def test_the_mask_of_a_token_does_not_depend_on_padding(n, padding, features):
    assert torch.equal(kept(range(3), n + padding, features)[:, :n], kept(range(3), n, features))
    attention = kept(range(3), 2, n + padding, n + padding)
    assert torch.equal(attention[..., :n, :n], kept(range(3), 2, n, n))


@pytest.mark.parametrize("shape", [(3, 20_001), (1, 3, 20_001)])
def test_long_vectors_have_masks_of_their_own(shape):
    """More than the 8192 elements for which places are reserved."""
    first, second = kept(range(1), *shape).view(3, -1)[:2]
    assert not torch.equal(first[2**13 : 2**14], second[: 2**13])
    assert not torch.equal(first[:-1], second[1:])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_keep_the_requested_share_and_elements_are_independent(p):
    """Each correlation is of 1.3 million pairs: 5 standard deviations are 0.0044."""
    masks = torch.stack([kept(range(8), 64, 128, step=step, p=p) for step in range(20)]).double()
    assert masks.mean().item() == pytest.approx(1 - p, abs=5 * (p * (1 - p) / masks.numel()) ** 0.5 + 2**-15)
    for dims in [(0, 1, 2), (0, 1, 3), (0, 2, 3), (1, 2, 3)]:  # no feature, token, row or step is dropped more often
        shares = masks.mean(dims)
        deviation = (p * (1 - p) * shares.numel() / masks.numel()) ** 0.5
        assert (shares - masks.mean()).abs().max() < 5.5 * deviation
    z = (masks - masks.mean()) / masks.std()
    pairs = {f"features {d}": (z[..., :-d], z[..., d:]) for d in (1, 2, 3, 4, 8, 16, 32, 64)}
    pairs |= {f"tokens {d}": (z[:, :, :-d], z[:, :, d:]) for d in (1, 2, 3, 4, 8, 16, 32)}
    pairs |= {f"rows {d}": (z[:, :-d], z[:, d:]) for d in (1, 2, 4)}
    pairs |= {f"steps {d}": (z[:-d], z[d:]) for d in (1, 2, 4)}
    for name, change in {"calls": {"call": 1}, "seeds": {"seed": 43}}.items():
        other = torch.stack([kept(range(8), 64, 128, step=step, p=p, **change) for step in range(20)]).double()
        pairs[name] = (z, (other - other.mean()) / other.std())
    pairs["three neighbors"] = (z[..., 2:] * z[..., 1:-1], z[..., :-2])
    pairs["four corners"] = (z[:, :, 1:, 1:] * z[:, :, :-1, 1:], z[:, :, 1:, :-1] * z[:, :, :-1, :-1])
    for name, (a, b) in pairs.items():
        assert abs((a * b).mean().item()) < 5 / a.numel() ** 0.5, name
    numbers = torch.arange(-5_000, 5_000, dtype=torch.int32)
    assert hash_integers(numbers, 123, -456).unique().numel() == len(numbers)


def test_dropped_elements_have_no_gradient_and_others_are_scaled():
    x = torch.randn(4, 6, 8, requires_grad=True)
    with RowDropout(42, 0, range(4)):
        result = functional.dropout(x, 0.25)
    result.sum().backward()
    expected = kept(range(4), 6, 8, p=0.25) / 0.75
    torch.testing.assert_close(result, x * expected)
    torch.testing.assert_close(x.grad, expected)


def test_dropout_of_nothing_or_everything_is_that_of_pytorch():
    x = torch.randn(4, 6)
    for p, training in ((0.0, True), (0.1, False), (1.0, True)):
        with RowDropout(42, 0, range(4)):
            assert torch.equal(functional.dropout(x, p, training), torch.dropout(x, p, training))
    with RowDropout(42, 0, range(4)):
        nearly_everything = functional.dropout(torch.ones(4, 64, 512), 0.99999)
    assert set(nearly_everything.unique().tolist()) == {0, 2**15}, "a probability that rounds to 1 still has a scale"


@pytest.mark.parametrize("shape", [(4,), (5, 3), (4, 2, 2, 2, 2)])
def test_a_tensor_without_rows_gets_a_mask_per_micro_batch(shape):
    with RowDropout(42, 0, range(4)):
        before = torch.get_rng_state()
        functional.dropout(torch.ones(4, 3), 0.5)
        assert torch.equal(torch.get_rng_state(), before)
        functional.dropout(torch.ones(shape), 0.5)
        assert not torch.equal(torch.get_rng_state(), before), "PyTorch's generator is not used"


def test_a_repeated_forward_pass_has_the_same_masks():
    """In reverse order, as backward() repeats the checkpointed parts of a forward pass: masks of rows and others."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        x = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        return functional.dropout(x.sin(), 0.5)

    def layers(x: torch.Tensor, repeat: bool) -> torch.Tensor:
        for _ in range(3):
            options = {"use_reentrant": False, "context_fn": contexts_of_checkpointing}
            x = checkpoint(layer, x, **options) if repeat else layer(x)
        return x

    gradients = []
    for repeat in (False, True):
        x = torch.ones(4, 3, 5, requires_grad=True)
        with RowDropout(42, 0, range(4)):
            result = layers(x, repeat)
        result.sum().backward()
        assert _get_current_function_mode_stack() == []
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def draws() -> list[list[float]]:
    """Numbers of every generator that a model or a library may use."""
    of_torch, of_numpy = torch.rand(4).tolist(), [*np.random.rand(4), np.random.randn()]
    return [of_torch, of_numpy, [random.random(), random.gauss(0, 1)]]


@given(place=PLACES, drawn=st.integers(0, 700), gaussian=st.booleans())
def test_a_micro_batch_has_the_same_random_numbers_whatever_was_drawn_before(place, drawn, gaussian):
    """NumPy and Python draw Gaussians in pairs: after an odd number of them, one is kept in the state."""
    seed_generators(*place)
    expected = draws()
    torch.rand(drawn), np.random.rand(drawn), [random.random() for _ in range(drawn)]
    if gaussian:
        torch.randn(1), np.random.randn(), random.gauss(0, 1)
    seed_generators(*place)
    assert draws() == expected


def test_no_two_of_thousands_of_micro_batches_share_their_random_numbers():
    numbers = []
    for place in product([42, 43], range(64), range(16)):  # as sums of the three would
        seed_generators(*place)
        numbers.append((torch.initial_seed(), np.random.rand(), random.random()))
    assert [len(set(of_library)) for of_library in zip(*numbers, strict=True)] == [len(numbers)] * 3
