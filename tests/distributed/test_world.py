"""How ranks are divided among nodes, and when gradients are summed in two levels."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from helpers.worlds import process_group_of

from app.distributed.world import Topology


@pytest.mark.parametrize(
    ("ranks", "inside", "nodes", "two_levels"),
    [(1, 1, 1, False), (8, 8, 1, False), (8, 1, 8, False), (8, 4, 2, True), (6, 2, 3, True), (12, 6, 2, False)],
)
def test_nodes_with_a_power_of_two_of_ranks_sum_in_two_levels(ranks, inside, nodes, two_levels):
    topology = Topology(ranks, inside)
    assert (topology.nodes, topology.two_levels) == (nodes, two_levels)
    with process_group_of(ranks - 1, ranks, inside) as world:
        sizes = [level.size for level in world.levels]
    assert sizes == ([inside, nodes] if two_levels else [ranks])


@pytest.mark.parametrize(("rank", "node", "peers"), [(0, [0, 1], [0, 2, 4]), (3, [2, 3], [1, 3, 5])])
def test_each_rank_is_in_the_group_of_its_node_and_in_that_of_its_local_rank(rank, node, peers):
    with process_group_of(rank, 6, 2) as world:
        assert [dist.get_process_group_ranks(level.group) for level in world.levels] == [node, peers]
        assert [level.rank for level in world.levels] == [rank % 2, rank // 2]
