"""The ranks that `app.bench.scaling` starts with torchrun: they measure what it asks for, one task after another.

Rank 0 is connected to `app.bench.scaling` by a Unix socket. Jobs with different numbers of ranks are open at the same
time and take turns, so each starts only once. A job that waits for its next task uses no CPU time.

All rows have the same length and no padding, so every rank and every step does the same work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from multiprocessing.connection import Client, Connection
from typing import Any

import torch
import torch.distributed as dist

from ...cli import OneLineParser
from ...distributed.collectives import all_gather_object, barrier, broadcast_object, wait_for_device
from ...distributed.process_group import join
from ...distributed.world import World
from ...program import launch
from ...settings import Settings
from ...training.console import quiet_libraries
from .replica import Replica, now, seconds_between

Task = dict[str, Any]


def add_arguments(parser: OneLineParser) -> None:
    parser.add_argument("--architecture", required=True, metavar="NAME", help="the model: see models.py")
    parser.add_argument("--socket", required=True, metavar="PATH", help="Unix socket that rank 0 connects to")


def main(settings: Settings, architecture: str, socket: str) -> None:
    with join(settings) as world:
        quiet_libraries(world)
        serve(settings, architecture, Client(socket) if world.is_main_process else None, world=world)


def serve(settings: Settings, architecture: str, connection: Connection | None, *, world: World) -> None:
    """Perform tasks until rank 0's connection is closed. Collective."""
    replicas: dict[tuple[str, bool], Replica] = {}
    while (task := broadcast_object(receive(connection) if connection else None, world)) is not None:
        if "sizes" in task:
            result: Any = time_collective(task, world)
        else:
            strategy, exchange = key = task["strategy"], task["exchange"]
            if key not in replicas:
                replicas[key] = Replica(architecture, strategy, exchange=exchange, settings=settings, world=world)
            result = time_steps(task, replicas[key], world)
        if connection:
            connection.send(result)


def receive(connection: Connection) -> Task | None:
    """Return the next task; None: the connection has been closed."""
    with suppress(EOFError):
        task: Task = connection.recv()
        return task
    return None


def time_steps(task: Task, replica: Replica, world: World) -> dict[str, Any]:
    """Time training steps. Collective.

    Args:
        task: `rows` of each rank, `length` of a row, and the number of `steps`.

    Returns:
        `seconds` of a step, on the slowest rank; and `buckets`, if nothing was exchanged under `ddp` or `zero1`: for
        each bucket its bytes and when it was ready, in seconds after the step began.
    """
    batch = replica.random_batch(task["rows"], task["length"])
    # DDP rearranges its buckets after the first step, and TCP adapts to a link.
    replica.train(batch, steps=1 if replica.steps else 3)
    barrier(world)
    replica.ready.clear()
    began = replica.train(batch, task["steps"])
    ended = now(world)
    wait_for_device(world)
    seconds = seconds_between(began[0], ended) / task["steps"]
    per_step = len(replica.ready) // task["steps"]
    ready = [(size, seconds_between(began[i // per_step], at)) for i, (size, at) in enumerate(replica.ready)]
    ranks = all_gather_object((seconds, ready), world)
    return {
        "seconds": max(seconds for seconds, _ in ranks),
        "buckets": [
            (ready[i][0], statistics.mean(at for _, ready in ranks for _, at in ready[i::per_step]))
            for i in range(per_step)
        ],
    }


def time_collective(task: Task, world: World) -> list[dict[str, float]]:
    """Time a collective. Collective.

    Args:
        task: the `collective`, `sizes` of the complete tensor in bytes, and how often to `repeat` each.

    Returns:
        For each size: `bytes`, the median of the `seconds` on the slowest rank, and `cpu_seconds` averaged over ranks
        and repetitions.
    """
    results = []
    for size in task["sizes"]:
        tensor = torch.zeros(size // 4, device=world.device)
        call = collective_call(task["collective"], tensor, world)
        call()
        barrier(world)
        cpu_began = time.process_time()
        moments = [now(world)]
        for _ in range(task["repeat"]):
            call()
            moments.append(now(world))
        wait_for_device(world)
        cpu_seconds = (time.process_time() - cpu_began) / task["repeat"]
        seconds = statistics.median(seconds_between(*ends) for ends in pairwise(moments))
        medians, means = zip(*all_gather_object((seconds, cpu_seconds), world), strict=True)
        results.append({"bytes": tensor.nbytes, "seconds": max(medians), "cpu_seconds": statistics.mean(means)})
    return results


def collective_call(collective: str, tensor: torch.Tensor, world: World) -> Callable[[], object]:
    """Return the call of a collective, on a tensor that is reduced, broadcast or divided among ranks, or gathered."""
    if collective == "all-reduce":
        return lambda: dist.all_reduce(tensor)
    if collective == "broadcast":
        return lambda: dist.broadcast(tensor, src=0)
    if collective == "all-to-all":
        received = torch.empty_like(tensor)
        return lambda: dist.all_to_all_single(received, tensor)
    assert collective == "all-gather", collective
    shard = tensor.view(world.size, -1)[world.rank]
    return lambda: dist.all_gather_into_tensor(tensor, shard)


if __name__ == "__main__":
    launch(main, __doc__, add_arguments)
