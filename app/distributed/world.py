"""The place of this process among the ranks of a job, and what the ranks communicate through."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from .topology import RankGroup, Topology


@dataclass(frozen=True)
class World:
    """One rank's view of the job. `join` creates it.

    Attributes:
        rank: this process's number among all ranks.
        size: the number of ranks.
        local_rank: this process's number among the ranks of its node.
        local_size: the number of ranks on this node.
        device: where this rank's tensors are: `cuda:<local_rank>` or `cpu`.
        store: the key-value store of this attempt; a restarted job gets a new one.
        timeout: how long a rank waits for another before it fails (`--ddp_timeout`).
        control_group: the gloo group for objects and barriers. On GPUs it is a second group next to NCCL's; on CPUs it
            is the default group (None). A rank that waits in gloo gets a Python exception after the timeout, whereas
            NCCL would abort the process.
        ranks_per_node: as in `Topology`.
        node_groups: the ranks of this node, and those of all nodes with the same local rank, if gradients are summed in
            two levels (`Topology.two_levels`); otherwise empty.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    store: Store
    timeout: timedelta
    control_group: dist.ProcessGroup | None = None
    ranks_per_node: int | None = None
    node_groups: tuple[RankGroup, ...] = ()

    @property
    def is_main_process(self) -> bool:
        return self.rank == 0

    @property
    def topology(self) -> Topology:
        """How the ranks are divided among nodes."""
        return Topology(self.size, self.ranks_per_node)

    @property
    def all_ranks(self) -> RankGroup:
        """All ranks, as a group."""
        return RankGroup(None, self.size, self.rank)

    @property
    def levels(self) -> tuple[RankGroup, ...]:
        """The groups in which gradients are summed, one after another."""
        return self.node_groups or (self.all_ranks,)

    def print_main(self, text: str) -> None:
        """Print on rank 0 only. Not a collective."""
        if self.is_main_process:
            print(text, flush=True)
