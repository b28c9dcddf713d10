"""Worlds without processes, for tests of code that depends on the rank or the number of ranks."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.testing._internal.distributed.fake_pg import FakeStore

from app.data.sampler import BatchPlan, plan_batches
from app.distributed.world import RankGroup, Topology, World, create_node_groups
from app.settings import Settings

T = TypeVar("T")
Collective = tuple[str, torch.Tensor, torch.Tensor]  # name, output, input
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


class ThreadNetwork:
    """Collectives among threads of this process, one for each rank. Stands in for `torch.distributed`.

    As in gloo, the n-th collective of a rank in a group belongs to the n-th one of every other rank of the group.
    A group is the range of its ranks; None is the group of all.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.started: dict[range, list[list[Collective]]] = {}  # by group and by rank in it
        self.n_completed: Counter[range] = Counter()
        self.called: list[list[tuple[str, range, int]]] = [[] for _ in range(size)]  # name, group, bytes; by rank
        self.changed = threading.Condition()
        self.current = threading.local()

    def world(self, rank: int, inside: int | None = None) -> World:
        """The world of a rank, on a single node or with `inside` ranks on each node."""
        world = fake_world(rank, self.size, inside=inside)
        if not world.topology.two_levels:
            return world
        inside, everyone = world.topology.inside, range(self.size)
        node, peers = everyone[rank - rank % inside :][:inside], everyone[rank % inside :: inside]
        groups: Any = [RankGroup(ranks, len(ranks), ranks.index(rank)) for ranks in (node, peers)]  # type: ignore[arg-type]
        return replace(world, node_groups=tuple(groups))

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
        return self._start("all-to-all", output, input, group, async_op)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Work | None:
        return self._start("all-gather", output, input, group, async_op)

    def all_reduce(self, tensor: torch.Tensor, async_op: bool = False) -> Work | None:
        return self._start("all-reduce", tensor, tensor, None, async_op)

    def broadcast(self, tensor: torch.Tensor, group_src: int, group: Any = None, async_op: bool = False) -> Work | None:
        return self._start(f"broadcast from {group_src}", tensor, tensor, group, async_op)

    def _start(
        self, name: str, output: torch.Tensor, input: torch.Tensor, group: range | None, async_op: bool
    ) -> Work | None:
        group = range(self.size) if group is None else group
        with self.changed:
            self.called[self.current.rank].append((name, group, input.numel() * input.element_size()))
            started = self.started.setdefault(group, [[] for _ in group])
            mine = started[group.index(self.current.rank)]
            mine.append((name, output, input))
            work = Work(self, group, len(mine), output)
            if all(len(theirs) > self.n_completed[group] for theirs in started):
                self._complete([theirs[self.n_completed[group]] for theirs in started])
                self.n_completed[group] += 1
                self.changed.notify_all()
        if async_op:
            return work
        work.wait()
        return None

    def _complete(self, collectives: Sequence[Collective]) -> None:
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
                received = inputs if kind == "all-gather" else inputs.view(len(inputs), len(inputs), -1)[:, rank]
            output.copy_(received.reshape(output.shape))


class Work:
    """The handle of a collective of `ThreadNetwork`."""

    def __init__(self, network: ThreadNetwork, group: range, number: int, output: torch.Tensor) -> None:
        self.network, self.group, self.number, self.output = network, group, number, output

    def wait(self) -> None:
        with self.network.changed:
            done = self.network.changed.wait_for(
                lambda: self.network.n_completed[self.group] >= self.number, timeout=20
            )
        assert done, f"not every rank has started collective {self.number}"

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        self.wait()
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([self.output])
        return future
