"""The ranks that `app.bench.scaling` starts with torchrun: they measure what it asks for, one task after another.

Rank 0 is connected to `app.bench.scaling` by a Unix socket. Jobs with different numbers of ranks are open at the same
time and take turns, so each starts only once. A job that waits for its next task uses no CPU time.

All rows have the same length and no padding, so every rank and every step does the same work.
"""

from __future__ import annotations

import statistics
import time
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

from ...cli import OneLineParser
from ...data.sampler import plan_batches
from ...ddp_loop import Batch, train_step
from ...distributed.collectives import all_gather_object, barrier, broadcast_object
from ...distributed.process_group import join
from ...distributed.world import World
from ...model.inputs import to_device
from ...program import launch
from ...settings import Settings
from ...strategies.optimization import LossScale, Optimization
from ...training.build import select_strategy
from ...training.console import quiet_libraries
from ...training.step import build_optimizer, build_scheduler
from ..harness import SIZES, build_bert

LEARNING_RATE = 1e-5
MANY_STEPS = 1_000_000  # for the schedule, which has to know how many steps there will be at most
Task = dict[str, Any]


class Replica:
    """A model with its optimizer, which trains on batches of any number of rows.

    Args:
        exchange: whether the ranks average their gradients. Without it, there have to be two ranks.
    """

    def __init__(self, size: str, exchange: bool, settings: Settings, *, world: World) -> None:
        self.settings, self.world, self.steps = settings, world, 0
        # Without exchange, for each bucket of each step: its bytes, and when it was ready, by the performance counter.
        self.ready: list[tuple[int, float]] = []
        plan = plan_batches(settings, n_train=settings.train_batch_size, world_size=world.size)
        self.strategy = select_strategy(settings, plan, world)
        self.model = build_bert(size, settings.seed)
        self.wrapped = self.strategy.wrap(self.model)
        if not exchange:
            # DDP accepts a single hook, and with more than two ranks the strategy has registered its own. A lambda,
            # because DDP rejects hooks whose annotations are strings.
            self.wrapped.register_comm_hook(self.ready, lambda ready, bucket: record_bucket(ready, bucket))  # type: ignore[operator]
        optimizer = build_optimizer(self.wrapped, settings, LEARNING_RATE, strategy=self.strategy)
        scheduler = build_scheduler(optimizer, settings, MANY_STEPS)
        self.optimization = Optimization(optimizer, scheduler, LossScale(settings.precision, plan, world))

    def train(self, batch: Batch, steps: int) -> list[float]:
        """Train on a batch several times; return when each step began, by the performance counter. Collective."""
        started = []
        for _ in range(steps):
            started.append(time.perf_counter())
            train_step(
                self.wrapped,
                [to_device(batch, self.model, self.world)],
                self.steps,
                optimization=self.optimization,
                strategy=self.strategy,
                settings=self.settings,
            )
            self.steps += 1
        return started

    def random_batch(self, rows: int, length: int) -> Batch:
        """Return rows of random tokens, which differ between ranks."""
        generator = torch.Generator().manual_seed(self.world.rank)
        tokens = torch.randint(self.model.config.vocab_size, (rows, length), generator=generator)
        labels = torch.randint(2, (rows,), generator=generator)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def record_bucket(ready: list[tuple[int, float]], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Record that a bucket of gradients is ready, as a communication hook that sends nothing."""
    ready.append((bucket.buffer().nbytes, time.perf_counter()))
    return noop_hook(None, bucket)


def add_arguments(parser: OneLineParser) -> None:
    parser.add_argument("--size", choices=list(SIZES), required=True, help="the model")
    parser.add_argument("--socket", required=True, metavar="PATH", help="Unix socket that rank 0 connects to")


def main(settings: Settings, size: str, socket: str) -> None:
    with join(settings) as world:
        quiet_libraries(world)
        serve(settings, size, Client(socket) if world.is_main_process else None, world=world)


def serve(settings: Settings, size: str, connection: Connection | None, *, world: World) -> None:
    """Perform tasks until rank 0's connection is closed. Collective."""
    replicas: dict[bool, Replica] = {}
    while (task := broadcast_object(receive(connection) if connection else None, world)) is not None:
        if "sizes" in task:
            result: Any = time_all_reduce(task, world)
        else:
            exchange = task["exchange"]
            if exchange not in replicas:
                replicas[exchange] = Replica(size, exchange, settings, world=world)
            result = time_steps(task, replicas[exchange], world)
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
        `seconds` of a step, on the slowest rank; and `buckets`, if nothing was exchanged: for each bucket its bytes and
        when it was ready, in seconds after the step began.
    """
    batch = replica.random_batch(task["rows"], task["length"])
    # DDP rearranges its buckets after the first step, and TCP adapts to a link.
    replica.train(batch, steps=1 if replica.steps else 3)
    barrier(world)
    replica.ready.clear()
    began = replica.train(batch, task["steps"])
    seconds = (time.perf_counter() - began[0]) / task["steps"]
    per_step = len(replica.ready) // task["steps"]
    ready = [(size, at - began[i // per_step]) for i, (size, at) in enumerate(replica.ready)]
    ranks = all_gather_object((seconds, ready), world)
    return {
        "seconds": max(seconds for seconds, _ in ranks),
        "buckets": [
            (ready[i][0], statistics.mean(at for _, ready in ranks for _, at in ready[i::per_step]))
            for i in range(per_step)
        ],
    }


def time_all_reduce(task: Task, world: World) -> list[dict[str, float]]:
    """Time DDP's all-reduce. Collective.

    Args:
        task: `sizes` in bytes, and how often to `repeat` each.

    Returns:
        For each size: `bytes`, the median of the `seconds` on the slowest rank, and `cpu_seconds` averaged over ranks
        and repetitions.
    """
    results = []
    for size in task["sizes"]:
        tensor = torch.zeros(size // 4, device=world.device)
        dist.all_reduce(tensor)
        barrier(world)
        cpu_began = time.process_time()
        seconds = []
        for _ in range(task["repeat"]):
            began = time.perf_counter()
            dist.all_reduce(tensor)
            seconds.append(time.perf_counter() - began)
        cpu_seconds = (time.process_time() - cpu_began) / task["repeat"]
        medians, means = zip(*all_gather_object((statistics.median(seconds), cpu_seconds), world), strict=True)
        results.append({"bytes": tensor.nbytes, "seconds": max(medians), "cpu_seconds": statistics.mean(means)})
    return results


if __name__ == "__main__":
    launch(main, __doc__, add_arguments)
