"""Ranks that are threads of this process, connected by gloo."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch.distributed as dist
from helpers.worlds import fake_world
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.distributed import HashStore
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from app.distributed.world import World, create_node_groups

T = TypeVar("T")
LIMIT = timedelta(seconds=60)  # how long a rank waits for another
ENDED: deque[list[Any]] = deque(maxlen=1)  # the groups of the last call, as in helpers/worlds.py


def on_ranks(work: Callable[[World], T], ranks: int, inside: int | None = None) -> list[T]:
    """Call `work(world)` on every rank at the same time, with `inside` ranks on each node. Return the results."""
    store, groups = HashStore(), []

    def on_rank(rank: int) -> T:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=LIMIT)
        world = fake_world(rank, ranks, inside=inside)
        world = replace(world, node_groups=create_node_groups(rank, world.topology, LIMIT))
        groups.append((dist.group.WORLD, world.node_groups))
        try:
            return work(world)
        finally:
            dist.destroy_process_group()

    # With this, `torch.distributed` has a default process group for each thread.
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(ranks) as pool:
        patch.setattr(dist.distributed_c10d, "_world", ThreadLocalWorld())
        _set_thread_isolation_mode(True)
        try:
            return list(pool.map(on_rank, range(ranks)))
        finally:
            _set_thread_isolation_mode(False)
            ENDED.append(groups)
