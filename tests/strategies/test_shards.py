"""Which rows of a parameter each rank holds, compared with what `fully_shard` gives it."""

from __future__ import annotations

import pytest
import torch
from helpers.worlds import process_group_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from app.strategies.shards import local_part, rows_of

SHAPES = ((1,), (2,), (3, 2), (4, 1, 3), (5,), (7, 2), (8,), (9, 3), (16, 2))


def shard(shapes: tuple[tuple[int, ...], ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parameters of a model before and after it is sharded over the default process group."""
    torch.manual_seed(0)
    model = nn.Module()
    model.parameters_ = nn.ParameterList([torch.randn(shape) for shape in shapes])
    complete = [parameter.detach().clone() for parameter in model.parameters()]
    return complete, list(fully_shard(model).parameters())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_the_rows_are_those_that_fully_shard_gives_to_the_rank(ranks):
    seen: list[list[torch.Tensor]] = [[] for _ in SHAPES]
    for rank in range(ranks):
        with process_group_of(rank, ranks):
            complete, sharded = shard(SHAPES)
            for i, (whole, part) in enumerate(zip(complete, sharded, strict=True)):
                assert isinstance(part, DTensor)
                start, length = rows_of(part)
                assert local_part(part).shape == (length, *whole.shape[1:])
                assert torch.equal(local_part(part), whole[start : start + length])
                moment = torch.zeros_like(part)  # as AdamW creates it
                assert rows_of(moment) == (start, length)
                seen[i].append(local_part(part).detach())
    for whole, parts in zip(complete, seen, strict=True):
        assert torch.equal(torch.cat(parts), whole), "each row is on one rank, in rank order"
        assert [len(part) for part in parts] == [len(part) for part in whole.tensor_split(ranks)] or ranks > 2


def test_the_last_ranks_may_have_no_rows():
    for rank, expected in enumerate([(0, 1), (1, 1), (2, 0), (2, 0)]):
        with process_group_of(rank, 4):
            _, (part,) = shard(((2, 3),))
            assert rows_of(part) == expected


def test_the_local_part_shares_memory_with_the_parameter():
    with process_group_of(1, 2):
        _, (part,) = shard(((4, 3),))
        with torch.no_grad():
            local_part(part).fill_(7)
        assert torch.equal(part.to_local(), torch.full((2, 3), 7.0))


@pytest.mark.parametrize("tensor", [torch.zeros(3, 2), torch.zeros(()), nn.Parameter(torch.zeros(2)), torch.zeros(0)])
def test_a_tensor_that_is_not_sharded_is_its_own_local_part(tensor):
    assert local_part(tensor) is tensor
    assert rows_of(tensor) == (None, 0)


def test_the_part_of_a_rank_is_not_recorded_by_autograd():
    with process_group_of(0, 2):
        _, (parameter, *_) = shard(SHAPES)
        assert parameter.requires_grad
        assert not local_part(parameter).requires_grad
