"""Collectives among threads of one process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import torch
from helpers.worlds import fake_world

from app.distributed.world import RankGroup, World

T = TypeVar("T")
Collective = tuple[str, torch.Tensor, torch.Tensor]  # name, output, input


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
