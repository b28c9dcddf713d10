"""The place of this process among the ranks of a job, and the store and groups through which they communicate."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from .topology import RankGroup, Topology


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
    # The gloo group for objects and barriers. A rank that waits in gloo gets a Python exception after the timeout,
    # whereas NCCL would abort the process. On CPUs it is the default group (None).
    control_group: dist.ProcessGroup | None = None
    ranks_per_node: int | None = None  # as in `Topology`
    node_groups: tuple[RankGroup, ...] = ()  # from `create_node_groups`

    @property
    def is_main_process(self) -> bool:
        return self.rank == 0

    @property
    def topology(self) -> Topology:
        return Topology(self.size, self.ranks_per_node)

    @property
    def all_ranks(self) -> RankGroup:
        return RankGroup(None, self.size, self.rank)

    @property
    def levels(self) -> tuple[RankGroup, ...]:
        """The groups in which gradients are summed, one after another."""
        return self.node_groups or (self.all_ranks,)

    def print_main(self, text: str) -> None:
        """Print on rank 0 only. Not a collective."""
        if self.is_main_process:
            print(text, flush=True)
