"""FSDP2's collectives without messages."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from app.bench.scaling.replica import OwnGradientsOnly, OwnShardOnly


@pytest.mark.parametrize("rank", [0, 1])
def test_an_all_gather_repeats_the_ranks_shard(rank):
    group = SimpleNamespace(size=lambda: 2, rank=lambda: rank)
    gathered = torch.full((6,), torch.nan)
    shard = gathered[3 * rank : 3 * rank + 3]  # as FSDP2 passes it on a CPU
    shard.copy_(torch.tensor([1.0, 2.0, 3.0]))
    OwnShardOnly()(gathered, shard, group)
    assert gathered.tolist() == [1, 2, 3, 1, 2, 3]
    elsewhere = torch.empty(6)
    OwnShardOnly()(elsewhere, shard, group)
    assert elsewhere.tolist() == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize(("rank", "expected"), [(0, [0.5, 1.0]), (1, [1.5, 2.0])])
def test_a_reduce_scatter_averages_the_ranks_gradients_with_zeros(rank, expected):
    group = SimpleNamespace(size=lambda: 2, rank=lambda: rank)
    gradients, shard = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.empty(2)
    OwnGradientsOnly()(shard, gradients, group, None)
    assert shard.tolist() == expected
