"""Worlds without processes, for tests of code that depends on the rank or the number of ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.testing._internal.distributed.fake_pg import FakeStore

from app.data.sampler import BatchPlan, plan_batches
from app.distributed.world import World
from app.settings import Settings

T = TypeVar("T")


def fake_world(rank: int = 0, size: int = 1, device: torch.device | str = "cpu") -> World:
    """One rank's world on a single node, without a process group."""
    return World(rank, size, rank, size, torch.device(device), HashStore(), timedelta(seconds=60))


@contextmanager
def process_group_of(rank: int, size: int) -> Iterator[World]:
    """The world of one of several ranks, without the others.

    Its collectives return at once and send nothing, which is enough for what depends only on the layout, such as which
    rows of a parameter a rank holds. With one rank they work.
    """
    if size == 1:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield fake_world(rank, size)
    finally:
        dist.destroy_process_group()


def batch_plan(ranks: int = 1, logical_ranks: int | None = None, accumulation: int = 1) -> BatchPlan:
    """A plan with micro-batches of 2 rows and 10 steps per epoch."""
    size = 2 * (logical_ranks or ranks) * accumulation
    settings = Settings(
        train_batch_size=size, logical_ranks=logical_ranks, gradient_accumulation_steps=accumulation, max_steps=10
    )
    return plan_batches(settings, 10 * size, ranks)


class ThreadNetwork:
    """Collectives among threads of this process, one for each rank. Stands in for `torch.distributed`.

    As in gloo, the n-th collective of a rank belongs to the n-th one of every other rank.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.started: list[list[tuple[str, torch.Tensor, torch.Tensor]]] = [[] for _ in range(size)]
        self.n_completed = 0
        self.changed = threading.Condition()
        self.current = threading.local()

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Call `work(rank)` for every rank at the same time. Return the results in rank order."""

        def on_rank(rank: int) -> T:
            self.current.rank = rank
            return work(rank)

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(on_rank, range(self.size)))

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Work | None:
        return self._start("all-to-all", output, input, async_op)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Work | None:
        return self._start("all-gather", output, input, async_op)

    def all_reduce(self, tensor: torch.Tensor, async_op: bool = False) -> Work | None:
        return self._start("all-reduce", tensor, tensor, async_op)

    def broadcast(self, tensor: torch.Tensor, src: int, async_op: bool = False) -> Work | None:
        return self._start(f"broadcast from {src}", tensor, tensor, async_op)

    def _start(self, name: str, output: torch.Tensor, input: torch.Tensor, async_op: bool) -> Work | None:
        with self.changed:
            mine = self.started[self.current.rank]
            mine.append((name, output, input))
            work = Work(self, len(mine), output)
            if all(len(theirs) > self.n_completed for theirs in self.started):
                self._complete([theirs[self.n_completed] for theirs in self.started])
                self.n_completed += 1
                self.changed.notify_all()
        if async_op:
            return work
        work.wait()
        return None

    def _complete(self, collectives: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
        names = {name for name, _, _ in collectives}
        assert len(names) == 1, f"the ranks have started different collectives: {sorted(names)}"
        inputs = torch.stack([input.flatten() for _, _, input in collectives])
        for rank, (name, output, _) in enumerate(collectives):
            kind, _, source = name.partition(" from ")
            if kind == "broadcast":
                received = inputs[int(source)]
            elif kind == "all-reduce":
                received = inputs.sum(dim=0)
            else:
                received = inputs if kind == "all-gather" else inputs.view(self.size, self.size, -1)[:, rank]
            output.copy_(received.reshape(output.shape))


class Work:
    """The handle of a collective of `ThreadNetwork`."""

    def __init__(self, network: ThreadNetwork, number: int, output: torch.Tensor) -> None:
        self.network, self.number, self.output = network, number, output

    def wait(self) -> None:
        with self.network.changed:
            done = self.network.changed.wait_for(lambda: self.network.n_completed >= self.number, timeout=20)
        assert done, f"not every rank has started collective {self.number}"

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        self.wait()
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([self.output])
        return future
