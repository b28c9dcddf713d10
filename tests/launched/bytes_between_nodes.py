"""Print how many bytes leave this node, counted by the kernel, divided by the size of the gradients."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from app.bench.two_nodes import INTERFACE
from app.distributed.collectives import barrier
from app.distributed.process_group import join
from app.distributed.world import World
from app.program import Program
from app.settings import Settings
from app.strategies.reduction import FixedOrderAllReduce, TreeSum, reduce_scatter_pairwise

GRADIENTS = torch.ones(2**20)


def count_all(settings: Settings) -> None:
    with join(settings) as world:
        assert len(world.levels) == 2
        counted = {"ring": count(lambda: dist.all_reduce(GRADIENTS.clone()), world)}
        for name, levels in (("two levels", world), ("one level", replace(world, node_groups=()))):
            hook = FixedOrderAllReduce([], TreeSum(), levels)
            counted[name] = count(lambda hook=hook: hook.exchange(GRADIENTS.clone(), True, 4).wait(), world)
        counted["reduce-scatter"] = count(
            lambda: reduce_scatter_pairwise(GRADIENTS.clone().view(4, -1), world.levels), world
        )
        if world.local_rank == 0:
            print(json.dumps(counted), flush=True)


def count(exchange: Callable[[], object], world: World) -> float:
    barrier(world)
    before = sent()
    barrier(world)
    exchange()
    barrier(world)
    return (sent() - before) / GRADIENTS.nbytes


def sent() -> int:
    """Return the bytes that this node's interface has sent so far."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    Program().launch(count_all)
