"""PowerSGD: low-rank approximations of the gradients. test_accumulation.py tests the other kinds of compression."""

from __future__ import annotations

import torch
from helpers.worlds import batch_plan
from torch import nn

from app.settings import Settings
from app.strategies.compression import MATRIX_RANK
from app.strategies.ddp import DDPStrategy

SHAPE = (40, 30)
GENERAL = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))  # of full rank
OUTER = torch.arange(40.0).outer(torch.arange(30.0))  # of rank 1


class Matrices(nn.Module):
    """Matrices, and a vector, with given gradients."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"general": SHAPE, "outer": SHAPE, "zeros": SHAPE, "vector": (30,)}
        self.all = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()})

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(self.all[name] * gradient).sum() for name, gradient in gradients.items()]).sum()


def test_what_power_sgd_leaves_out_is_added_to_the_next_steps(world):
    """The sum of what is exchanged is close to the sum of the gradients. One of a lower rank is exact.

    With a lower MATRIX_RANK, one of zeros would become NaN, and one of rank 1 up to twice as large.
    """
    strategy = DDPStrategy(Settings(ddp_comm_hook="power_sgd"), batch_plan(), world)
    wrapped, steps, total = strategy.wrap(Matrices()), 40, torch.zeros(())
    for step in range(2 + steps):
        zeros = torch.full(SHAPE, float(step == 3))  # zeros do not end the training of a matrix
        gradients = {"general": GENERAL, "outer": OUTER, "zeros": zeros, "vector": GENERAL[0]}
        wrapped.zero_grad()
        with strategy.accumulate(wrapped, 0):
            wrapped(gradients).backward()
        found = {name: parameter.grad for name, parameter in wrapped.module.all.items()}
        assert torch.equal(found["vector"], GENERAL[0])
        assert torch.equal(found["general"], GENERAL) == (step < 2), "the first steps are not compressed"
        # Sums over rows and columns round relative to the norm of the matrix, not to each of its elements.
        for name in ("outer", "zeros"):
            norm = max(gradients[name].norm(), torch.ones(SHAPE).norm())
            assert (found[name] - gradients[name]).norm() <= 32 * torch.finfo(torch.float32).eps * norm
        if step >= 2:
            assert torch.linalg.matrix_rank(found["general"], rtol=1e-4) <= MATRIX_RANK
            total = total + found["general"]
    assert (total / steps - GENERAL).norm() < 0.2 * (found["general"] - GENERAL).norm()
