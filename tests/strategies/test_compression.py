"""Gradients that are compressed before the ranks exchange them."""

from __future__ import annotations

import pytest
import torch
from helpers.worlds import batch_plan
from strategies.gradients import flat, flat_gradients
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from app.settings import Settings
from app.strategies.compression import HOOK_DTYPES, MATRIX_RANK
from app.strategies.ddp import DDPStrategy

X = torch.randn(8, 24, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """A matrix that is worth compressing, one that is not, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def gradients(strategy: DDPStrategy, wrapped: nn.Module) -> list[torch.Tensor]:
    """Return the gradients of a step."""
    wrapped.zero_grad()
    with strategy.accumulate(wrapped, 0):
        wrapped(X).backward()
    return [parameter.grad.clone() for parameter in wrapped.module.parameters()]


@pytest.mark.parametrize(("hook", "of_pytorch"), [("fp16", fp16_compress_hook), ("bf16", bf16_compress_hook)])
def test_one_logical_rank_per_process_is_rounded_as_by_the_hook_of_pytorch(world, hook, of_pytorch):
    strategy = DDPStrategy(Settings(ddp_comm_hook=hook), batch_plan(), world)
    theirs = DistributedDataParallel(Model())
    # Not the function itself: DDP refuses bf16_compress_hook with gloo.
    theirs.register_comm_hook(None, lambda group, bucket: of_pytorch(group, bucket))
    theirs(X).backward()
    assert torch.equal(flat(gradients(strategy, strategy.wrap(Model()))), flat_gradients(list(theirs.parameters())))


@pytest.mark.parametrize(("hook", "dtype"), [("no", torch.float32), *HOOK_DTYPES.items()])
def test_the_gradients_of_a_transposed_parameter_are_added_element_by_element(world, hook, dtype):
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.weight = nn.Parameter(torch.ones(3)), nn.Parameter(torch.randn(3, 2).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight + self.bias).square().sum()

    torch.manual_seed(0)
    model, inputs = Transposed(), torch.randn(2, 4, 2)
    strategy = DDPStrategy(Settings(ddp_comm_hook=hook), batch_plan(1, 2), world)
    leaves = [torch.autograd.grad(model(x) / 2, [model.bias, model.weight]) for x in inputs]
    wrapped = strategy.wrap(model)
    for number, x in enumerate(inputs):
        with strategy.accumulate(wrapped, number):
            (wrapped(x) / 2).backward()
    for parameter, first, second in zip([model.bias, model.weight], *leaves, strict=True):
        assert torch.equal(parameter.grad, (first.to(dtype) + second.to(dtype)).float())


def test_what_power_sgd_leaves_out_is_added_to_the_next_steps(world):
    """The sum of what is exchanged is close to the sum of the gradients, whose rank is higher."""
    strategy = DDPStrategy(Settings(ddp_comm_hook="power_sgd"), batch_plan(), world)
    wrapped, steps, total = strategy.wrap(Model()), 40, torch.zeros(())
    plain, *_ = torch.autograd.grad(wrapped.module(X), list(wrapped.module.parameters()))
    for step in range(2 + steps):
        found = gradients(strategy, wrapped)[0]
        assert torch.equal(plain, found) == (step < 2), "the first steps are not compressed"
        if step >= 2:
            ranks = [torch.linalg.matrix_rank(gradient, rtol=1e-4) for gradient in (found, plain)]
            assert ranks[0] <= MATRIX_RANK < ranks[1]
            total = total + found
    assert 0 < (total / steps - plain).norm() < 0.2 * (found - plain).norm()


def test_a_matrix_of_zeros_or_of_rank_one_is_approximated_exactly(world):
    """With a lower MATRIX_RANK, one of zeros would become NaN, and one of rank 1 up to twice as large."""

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.zeros, self.outer = nn.Parameter(torch.zeros(40, 30)), nn.Parameter(torch.zeros(40, 30))

        def forward(self, zero: float) -> torch.Tensor:
            gradient = torch.arange(40.0).outer(torch.arange(30.0))
            return (self.zeros * zero).sum() + (self.outer * gradient).sum()

    strategy = DDPStrategy(Settings(ddp_comm_hook="power_sgd"), batch_plan(), world)
    wrapped = strategy.wrap(Products())
    for step in range(5):
        zero = float(step == 3)  # zeros do not end the training of a matrix
        with strategy.accumulate(wrapped, 0):
            wrapped(zero).backward()
        expected = [torch.full((40, 30), zero), torch.arange(40.0).outer(torch.arange(30.0))]
        # Sums over rows and columns round relative to the norm of the matrix, not to each of its elements.
        for parameter, gradient in zip(wrapped.module.parameters(), expected, strict=True):
            norm = max(gradient.norm(), torch.ones(40, 30).norm())
            assert (parameter.grad - gradient).norm() <= 32 * torch.finfo(torch.float32).eps * norm
        wrapped.zero_grad()
