"""Worlds without processes, for tests of code that depends on the rank or the number of ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.testing._internal.distributed.fake_pg import FakeStore

from app.data.batches import BatchPlan, plan_batches
from app.distributed.world import Topology, World, create_node_groups
from app.settings import Settings

# Groups that were destroyed a moment ago. A DDP module that outlives its group must not release it: it would wait for
# gloo's threads without releasing the GIL, which they may still need to release the tensors of their last collective.
ENDED: deque[Any] = deque(maxlen=4)


def fake_world(rank: int = 0, size: int = 1, device: torch.device | str = "cpu", inside: int | None = None) -> World:
    """One rank's world without a process group, on a single node or with `inside` ranks on each node."""
    inside = inside or size
    return World(
        rank,
        size,
        rank % inside,
        inside,
        torch.device(device),
        HashStore(),
        timedelta(seconds=60),
        Topology(size, inside),
    )


@contextmanager
def process_group_of(rank: int, size: int, inside: int | None = None) -> Iterator[World]:
    """The world of one of several ranks, without the others.

    Its collectives return at once and send nothing, which is enough for what depends only on the layout, such as which
    rows of a parameter a rank holds. With one rank they work.
    """
    if size == 1:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        world = fake_world(rank, size, inside=inside)
        yield replace(world, node_groups=create_node_groups(rank, world.topology, world.timeout))
    finally:
        ENDED.append(dist.group.WORLD)
        dist.destroy_process_group()


def batch_plan(ranks: int = 1, logical_ranks: int | None = None, accumulation: int = 1) -> BatchPlan:
    """A plan with micro-batches of 2 rows and 10 steps per epoch."""
    size = 2 * (logical_ranks or ranks) * accumulation
    settings = Settings(
        train_batch_size=size, logical_ranks=logical_ranks, gradient_accumulation_steps=accumulation, max_steps=10
    )
    return plan_batches(settings, 10 * size, ranks)
