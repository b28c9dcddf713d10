"""Messages between two ranks, and the operations of a reduction."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from app.bench import rounds
from app.bench.communication import messages
from app.common.errors import RunError


@pytest.fixture(autouse=True)
def one_round(monkeypatch):
    monkeypatch.setattr(rounds, "ROUNDS", 1)
    monkeypatch.setattr(rounds, "FEWEST_ROUNDS", 1)


def test_the_results_of_all_operations_are_checked(world, monkeypatch):
    section = messages.measure_operations(world, 1024, seconds=0.001, disable_tqdm=True)
    assert {name: entry["result"] for name, entry in section.data.items()} == messages.results_of(1)
    (table,) = section.parts
    assert table.rows[0][3:] == ["1.000"] * 3
    assert [row[0] for row in table.rows] == ["sum", "avg: sum, then divided", "product", "min", "max"]
    monkeypatch.setattr(messages, "reduce_with", lambda name, tensor, ranks: tensor.zero_())
    with pytest.raises(RunError, match="an all-reduce with sum returned 0, not 3"):
        messages.measure_operations(world, 1024, seconds=0.001, disable_tqdm=True)


def test_results_of_four_ranks():
    assert messages.results_of(4) == {"sum": 7, "avg": 1.75, "product": 6, "min": 1, "max": 3}


def test_a_message_goes_there_and_back(monkeypatch):
    calls = []
    monkeypatch.setattr(dist, "send", lambda tensor, dst: calls.append(("send", dst)))
    monkeypatch.setattr(dist, "recv", lambda tensor, src: calls.append(("recv", src)))
    expected = {0: [("send", 2), ("recv", 2)], 1: [], 2: [("recv", 0), ("send", 0)]}
    for rank, of_rank in expected.items():
        calls.clear()
        messages.send_and_return(torch.zeros(1), 2, rank=rank)
        assert calls == of_rank
