"""The ladder of exchanges: which buffers each variant exchanges. test_sections.py compares their times."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.worlds import batch_plan, fake_world

from app.bench.ladder import ExchangeAfterBackward
from app.settings import Settings


@pytest.mark.parametrize(
    ("mib", "exchanged"),
    [(None, []), (0.0, [4, 3, 2]), (float("inf"), [9]), (7 * 4 / 2**20, [7, 2])],
)
def test_gradients_are_averaged_in_buffers_of_the_given_size(monkeypatch, mib, exchanged):
    sizes = []

    def double(tensor, async_op=False):  # the other rank has the same gradients
        sizes.append(tensor.numel())
        tensor.mul_(2)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "all_reduce", double)
    strategy = ExchangeAfterBackward(Settings(), batch_plan(2), fake_world(0, 2), mib=mib)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(n)) for n in (2, 3, 4)])
    assert strategy.wrap(model) is model
    for number in range(strategy.plan.micro_batches_per_step):
        with strategy.accumulate(model, number):
            assert sizes == [], "only after the last backward pass"
            sum((parameter * (i + 1)).sum() for i, parameter in enumerate(model)).backward()
    assert sizes == exchanged
    factor = strategy.plan.micro_batches_per_step * (0.5 if mib is None else 1)
    for i, parameter in enumerate(model):
        assert parameter.grad.tolist() == [(i + 1) * factor] * len(parameter)
