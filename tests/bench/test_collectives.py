"""The laboratory's sections on messages, with one rank; tests/launched has more of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from app.bench import collectives
from app.bench.collectives import COLLECTIVES, fit_alpha_beta, sizes_up_to
from app.common.errors import AgreedError


def test_every_collective_is_pictured_and_timed(make_lab):
    lab = make_lab()
    collectives.collectives(lab)
    numbers = lab.page.numbers
    assert numbers["pictures"] == {name: {"before": [[11]], "after": [[11]]} for name in COLLECTIVES}
    variants = ["reduce-scatter, pairwise", "all-gather, in place"]
    assert list(numbers["times"]) == [*COLLECTIVES, *variants]
    for measured in numbers["times"].values():
        assert [point["bytes"] for point in measured["points"]] == [2**10, 2**12, 2**14, 2**16]
        assert min(seconds for point in measured["points"] for seconds in point["seconds"]) > 0
    assert all(name in lab.page.text[-1] for name in numbers["times"])


def test_sizes_can_be_divided_among_all_ranks():
    assert sizes_up_to(2**16, 3) == [1032, 4104, 16392, 65544]
    assert sizes_up_to(2**20 + 1, 1)[-2:] == [2**20, 2**20 + 4]


def test_a_line_is_fitted_with_relative_errors():
    sizes = np.array([2.0**i for i in range(10, 29, 2)])
    fit = fit_alpha_beta(sizes, 50e-6 + sizes / 4e9)
    assert (fit.alpha, 1 / fit.beta) == (pytest.approx(50e-6, rel=1e-3), pytest.approx(4e9, rel=1e-3))
    assert fit.relative_error < 1e-3
    # One size that was disturbed changes neither of them by much, although its error is longer than any latency.
    seconds = 50e-6 + sizes / 4e9
    seconds[-1] *= 1.3
    fit = fit_alpha_beta(sizes, seconds)
    assert (fit.alpha, 1 / fit.beta) == (pytest.approx(50e-6, rel=0.1), pytest.approx(4e9, rel=0.2))
    assert fit.alpha_error > 0
    # Neither is negative; and times that do not depend on the size tell nothing about the bandwidth.
    falling = fit_alpha_beta(sizes, np.linspace(2e-4, 1e-4, len(sizes)))
    assert falling.alpha > 0
    assert 0 <= falling.beta < falling.beta_error


def test_every_operation_is_compared_with_the_sum(make_lab, monkeypatch):
    called = []
    reduce = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda t, op=dist.ReduceOp.SUM: (called.append(op), reduce(t, op=op)))
    lab = make_lab()
    collectives.operations(lab)
    assert list(lab.page.numbers["seconds"]) == ["sum", "avg", "product", "min", "max"]
    operations = [dist.ReduceOp.SUM, dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
    assert called[:5] == operations, "gloo has no average"


def test_an_exchange_in_pieces_is_extrapolated(make_lab, monkeypatch):
    pieces: list[int] = []

    class Done:
        def wait(self) -> None:
            pass

    def reduce(tensor: torch.Tensor, async_op: bool) -> Done:
        assert async_op
        pieces.append(len(tensor))
        return Done()

    monkeypatch.setattr(dist, "all_reduce", reduce)
    monkeypatch.setattr(collectives, "MOST_PIECES", 2)
    monkeypatch.setattr(collectives, "PIECES", (1000, 10_000))
    lab = make_lab()
    collectives.granularity(lab)
    n = 2**16 // 4
    assert lab.page.numbers["elements"] == n
    assert list(lab.page.numbers["seconds"]) == [n, 10_000, 1000]
    assert pieces[:5] == [n, 10_000, n - 10_000, 1000, 1000], "of 17 pieces, two are exchanged"
    assert "| 16,384" in lab.page.text[-1]


def test_a_message_needs_two_ranks(make_lab):
    with pytest.raises(AgreedError, match="a message needs two ranks: start more"):
        collectives.point_to_point(make_lab())
