"""An exchange in pieces."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from app.bench import rounds
from app.bench.communication import granularity
from app.bench.communication.granularity import all_reduce_in_pieces, measure_granularity


def test_every_number_is_exchanged_once(monkeypatch):
    started, waited = [], []

    class Handle:
        def wait(self):
            waited.append(len(started))

    def add_ones(tensor, async_op):
        assert async_op
        started.append(len(tensor))
        tensor.add_(1)
        return Handle()

    monkeypatch.setattr(dist, "all_reduce", add_ones)
    tensor = torch.zeros(10)
    all_reduce_in_pieces(tensor, 4)
    assert started == [4, 4, 2]
    assert waited == [3, 3, 3], "all have started before the first wait"
    assert tensor.tolist() == [1] * 10


@pytest.mark.parametrize(("largest", "sizes"), [(40_000, ["1000", "10000"]), (8_000, ["1000", "2000"])])
def test_pieces_are_compared_with_one_exchange(monkeypatch, world, largest, sizes):
    monkeypatch.setattr(rounds, "ROUNDS", 1)
    monkeypatch.setattr(rounds, "FEWEST_ROUNDS", 1)
    section = measure_granularity(largest, seconds=0.001, world=world, disable_tqdm=True)
    assert section.data["elements"] == largest // 4
    assert list(section.data["seconds"]) == sizes
    figure, table = section.parts
    assert [row[2] for row in table.rows] == [str(largest // 4 // int(size)) for size in sizes]
    assert table.rows[-1][4:] == ["1.000"] * 3
    assert "size of a piece" in figure.svg


def test_of_many_pieces_some_are_exchanged_and_the_time_is_that_of_all(monkeypatch, world):
    lengths = []

    def time_calls(calls, *_, **__):
        for call in calls.values():
            lengths.append(len(call.args[0]))
        return {size: [1.0] for size in calls}

    monkeypatch.setattr(granularity, "time_calls", time_calls)
    monkeypatch.setattr(granularity, "MOST_PIECES", 4)
    section = measure_granularity(40_000, seconds=1.0, world=world, disable_tqdm=True)
    assert lengths == [4_000, 10_000]
    assert section.data["seconds"] == {"1000": [2.5], "10000": [1.0]}
