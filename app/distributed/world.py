"""The place of this process among the ranks and nodes of a job, and the groups through which they communicate."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from tqdm import tqdm


@dataclass(frozen=True)
class Topology:
    """How many ranks there are, and on how many nodes."""

    ranks: int
    inside: int  # on each node; if the nodes have different numbers, all ranks count as one node's

    @property
    def nodes(self) -> int:
        return self.ranks // self.inside

    @property
    def two_levels(self) -> bool:
        """Whether gradients are summed inside the nodes first, and then between them."""
        # That is the same binary tree only if the number of ranks on a node is a power of two. Otherwise the tree adds
        # a rank to a rank of another node before it has added all ranks of its own.
        return self.nodes > 1 and self.inside > 1 and self.inside & (self.inside - 1) == 0


@dataclass(frozen=True)
class RankGroup:
    """A group of ranks that call collectives together."""

    group: dist.ProcessGroup | None  # None: the default group, of all ranks
    size: int
    rank: int  # of this process in the group


def create_node_groups(rank: int, topology: Topology, timeout: timedelta) -> tuple[RankGroup, ...]:
    """Create the process groups in which gradients are summed in two levels. Collective.

    Returns:
        The ranks of this node, and the ranks of all nodes with this local rank; nothing if there is only one level.
    """
    if not topology.two_levels:
        return ()
    everyone, inside = list(range(topology.ranks)), topology.inside
    nodes = [everyone[first : first + inside] for first in everyone[::inside]]
    same_local_rank = [everyone[local::inside] for local in range(inside)]
    node, _ = dist.new_subgroups_by_enumeration(nodes, timeout=timeout)
    peers, _ = dist.new_subgroups_by_enumeration(same_local_rank, timeout=timeout)
    return RankGroup(node, inside, rank % inside), RankGroup(peers, topology.nodes, rank // inside)


@dataclass(frozen=True)
class World:
    """One rank's view of the job. `join` creates it."""

    rank: int
    size: int
    local_rank: int
    local_size: int  # the number of ranks on this node
    device: torch.device
    store: Store  # of this attempt; a restarted job gets a new one
    timeout: timedelta  # how long a rank waits for another before it fails (`--ddp_timeout`)
    topology: Topology
    # The gloo group for objects and barriers. A rank that waits in gloo gets a Python exception after the timeout,
    # whereas NCCL would abort the process. On CPUs it is the default group (None).
    control_group: dist.ProcessGroup | None = None
    node_groups: tuple[RankGroup, ...] = ()  # from `create_node_groups`

    @property
    def is_main_process(self) -> bool:
        return self.rank == 0

    @property
    def levels(self) -> tuple[RankGroup, ...]:
        """The groups in which gradients are summed, one after another."""
        return self.node_groups or (RankGroup(None, self.size, self.rank),)

    def print_main(self, text: str) -> None:
        """Print on rank 0 only. Not a collective."""
        if self.is_main_process:
            with tqdm.external_write_mode():  # above the progress bar, if there is one
                print(text, flush=True)
