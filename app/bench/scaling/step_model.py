"""Predict the time of a training step with DDP from the time of its computation and the cost of its exchanges.

The model is that of Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020,
section 3.2, with two additions for CPUs: ranks share cores, and an exchange over TCP takes CPU time itself. See
docs/scaling.md#the-model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..alpha_beta import AlphaBeta
from .gloo_ring import simulate_ring
from .links.shaped_link import Link


@dataclass(frozen=True)
class Computation:
    """The computation of one rank in a step, measured without exchanges."""

    seconds: float  # of the whole step
    buckets: tuple[tuple[int, float], ...]  # bytes of each, and when it is ready, in seconds after the step began

    @property
    def size(self) -> int:
        """The bytes of all gradients."""
        return sum(size for size, _ in self.buckets)

    def scaled(self, factor: float) -> Computation:
        """Return a computation that takes `factor` times as long."""
        return Computation(self.seconds * factor, tuple((size, at * factor) for size, at in self.buckets))


@dataclass(frozen=True)
class Cores:
    """The number of cores of a node, which its `ranks` with `threads` threads each share."""

    cores: int
    ranks: int
    threads: int = 1

    @property
    def slowdown(self) -> float:
        """How much longer a computation takes than with a core for each thread."""
        return max(1.0, self.ranks * self.threads / self.cores)

    @property
    def displaced(self) -> float:
        """The share of the CPU time of exchanges that is taken from computations, because no core is idle.

        An exchange keeps up to one core per rank busy. With at least twice as many cores as threads it is free.
        """
        idle = self.cores - self.ranks * self.threads
        return min(1.0, max(0.0, 1 - idle / self.ranks))


# Returns when each bucket's exchange has finished, from when they are ready (ascending) and their sizes in bytes.
Finish = Callable[[Sequence[float], Sequence[int]], list[float]]


@dataclass(frozen=True)
class Network:
    """The cost of exchanging buckets of gradients."""

    finish: Finish
    cpu_seconds: Callable[[int], float] = lambda size: 0.0  # of each rank, from a bucket's size
    start: float = 0.0  # seconds that a step waits at its beginning, where DDP broadcasts the model's buffers


def one_after_another(seconds: Callable[[int], float]) -> Finish:
    """Return the `finish` of a network where an exchange also waits until the one before has ended."""

    def finish(ready: Sequence[float], sizes: Sequence[int]) -> list[float]:
        ends: list[float] = []
        for at, size in zip(ready, sizes, strict=True):
            ends.append(max([at, *ends[-1:]]) + seconds(size))
        return ends

    return finish


def predict_step(computation: Computation, network: Network, cores: Cores) -> float:
    """Return the predicted seconds of a step, from the computation with a core for each thread and a node's cores."""
    slow = computation.scaled(cores.slowdown)
    sizes = [size for size, _ in slow.buckets]
    ready, delay = [], network.start
    for size, at in slow.buckets:
        ready.append(at + delay)
        delay += cores.displaced * cores.slowdown * network.cpu_seconds(size)
    backward_ends = ready[-1]  # the last bucket is exchanged after it, so nothing is left to be displaced
    update = slow.seconds - slow.buckets[-1][1]
    return max(backward_ends, *network.finish(ready, sizes)) + update


def local_network(wall: AlphaBeta, cpu: AlphaBeta, cores: Cores) -> Network:
    """Return the loopback device of a node, where copying limits an exchange and the ranks share the cores.

    Args:
        wall: seconds of an all-reduce among two ranks, with a core for each thread.
        cpu: CPU seconds of each of the two ranks.
    """
    ranks = cores.ranks

    def from_two_ranks(line: AlphaBeta, size: int) -> float:
        """Convert the time of two ranks (two messages, and `size` bytes sent) to this number of ranks."""
        return line.seconds(2 * (ranks - 1) / ranks * size, messages=ranks - 1)

    # CPU time does not include waiting for a core.
    return Network(
        one_after_another(lambda size: from_two_ranks(wall, size) * cores.slowdown),
        lambda size: from_two_ranks(cpu, size),
    )


def two_nodes(link: Link, wall: AlphaBeta, cpu: AlphaBeta) -> Network:
    """Return a link between two nodes with one rank each, and gloo's ring all-reduce over it.

    Args:
        wall: seconds of an all-reduce over the same link, unshaped.
        cpu: CPU seconds of each rank in it, including half of what emulating the link takes.
    """

    def finish(ready: Sequence[float], sizes: Sequence[int]) -> list[float]:
        return simulate_ring([at + wall.alpha for at in ready], sizes, link, software=wall.beta)

    # In a broadcast of the buffers, rank 1 announces that it receives, and rank 0 sends: two delays.
    return Network(finish, cpu.seconds, start=2 * link.delay)
