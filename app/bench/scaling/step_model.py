"""Predict the time of a training step with DDP from the time of its computation and the cost of its exchanges.

The model is that of Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020,
section 3.2: the backward pass makes the buckets of gradients ready one after another, and each is exchanged while the
next is computed. What is exchanged after the backward pass has ended is exposed. Then every rank updates its weights.

Two things are added for CPUs. Ranks that share cores compute more slowly (`Cores.slowdown`). And an exchange over TCP
takes CPU time itself; where no core is idle, that time is taken from the computation (`Cores.displaced`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..alpha_beta import AlphaBeta
from .gloo_ring import LinkPath, simulate_ring


@dataclass(frozen=True)
class Computation:
    """The computation of one rank in a step, measured without exchanges.

    Attributes:
        seconds: of the whole step.
        buckets: size in bytes and time, in seconds after the step began, of each bucket that becomes ready.
    """

    seconds: float
    buckets: tuple[tuple[int, float], ...]

    @property
    def size(self) -> int:
        """The bytes of all gradients."""
        return sum(size for size, _ in self.buckets)

    def scaled(self, factor: float) -> Computation:
        """Return a computation that takes `factor` times as long."""
        return Computation(self.seconds * factor, tuple((size, at * factor) for size, at in self.buckets))


@dataclass(frozen=True)
class Cores:
    """The cores of a node, which its ranks share.

    Attributes:
        cores: their number.
        ranks: on this node.
        threads: of each rank.
    """

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


class Network(Protocol):
    """What exchanges buckets of gradients."""

    def finish(self, ready: Sequence[float], sizes: Sequence[int]) -> list[float]:
        """Return when each bucket's exchange has finished, in seconds.

        Args:
            ready: when each bucket is ready, in seconds, in ascending order.
            sizes: of the buckets in bytes.
        """

    def cpu_seconds(self, size: int) -> float:
        """Return the CPU time that exchanging a bucket takes per rank."""

    @property
    def start(self) -> float:
        """The seconds that a step waits at its beginning, where DDP broadcasts the model's buffers."""


def one_after_another(ready: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Return when each exchange ends if it starts once it is ready and the one before it has ended."""
    ends: list[float] = []
    for at, takes in zip(ready, seconds, strict=True):
        ends.append(max([at, *ends[-1:]]) + takes)
    return ends


def predict_step(computation: Computation, network: Network, cores: Cores) -> float:
    """Return the predicted time of a step in seconds.

    Args:
        computation: with a core for each thread.
        network: between the ranks.
        cores: of each node.
    """
    slow = computation.scaled(cores.slowdown)
    sizes = [size for size, _ in slow.buckets]
    ready, delay = [], network.start
    for size, at in slow.buckets:
        ready.append(at + delay)
        delay += cores.displaced * cores.slowdown * network.cpu_seconds(size)
    backward_ends = ready[-1]  # the last bucket is exchanged after it, so nothing is left to be displaced
    update = slow.seconds - slow.buckets[-1][1]
    return max(backward_ends, *network.finish(ready, sizes)) + update


# ---- ranks on one node ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalNetwork:
    """Ranks that share the cores of a node and exchange buckets over its loopback device. Implements `Network`.

    Such an exchange is limited by the CPU: it copies every byte several times. Its time is measured with two ranks. N
    ranks send 2 (N - 1) / N times the bucket's size each, in 2 (N - 1) messages, and share the cores. That holds for
    the ring as well as for the all-to-all and the all-gather of `app.strategies.reduction`.

    Attributes:
        wall: seconds of an all-reduce among two ranks, with a core for each thread.
        cpu: CPU seconds of each of the two ranks.
        cores: which the ranks share.
    """

    wall: AlphaBeta
    cpu: AlphaBeta
    cores: Cores

    @property
    def start(self) -> float:
        """Nothing: it is part of the measured computation."""
        return 0.0

    def finish(self, ready: Sequence[float], sizes: Sequence[int]) -> list[float]:
        """Return when each bucket's exchange has finished: one after another, because they share the cores."""
        slowdown = self.cores.slowdown
        return one_after_another(ready, [self._from_two_ranks(self.wall, size) * slowdown for size in sizes])

    def cpu_seconds(self, size: int) -> float:
        """Return the CPU time of one rank, which does not include waiting for a core."""
        return self._from_two_ranks(self.cpu, size)

    def _from_two_ranks(self, fit: AlphaBeta, size: int) -> float:
        """Return what is measured with two ranks (two messages, and `size` bytes sent), for this number of ranks."""
        ranks = self.cores.ranks
        return fit.seconds(2 * (ranks - 1) / ranks * size, messages=ranks - 1)


# ---- two nodes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TwoNodes:
    """Two nodes with one rank each, and gloo's ring all-reduce over the link between them. Implements `Network`.

    Attributes:
        bytes_per_second: the rate of the link in each direction.
        delay: its propagation delay in seconds.
        wall: seconds of an all-reduce over the same link without a limit to its rate and without delay.
        cpu: CPU seconds of each rank in it, including half of what emulating the link takes.
    """

    bytes_per_second: float
    delay: float
    wall: AlphaBeta
    cpu: AlphaBeta

    @property
    def start(self) -> float:
        """A broadcast of the buffers: rank 1 announces that it receives, and rank 0 sends."""
        return 2 * self.delay

    def finish(self, ready: Sequence[float], sizes: Sequence[int]) -> list[float]:
        """Return when each bucket's exchange has finished."""
        path = LinkPath(self.bytes_per_second, self.delay, software=self.wall.beta)
        return simulate_ring([at + self.wall.alpha for at in ready], sizes, path)

    def cpu_seconds(self, size: int) -> float:
        """Return the CPU time of one rank."""
        return self.cpu.seconds(size)
