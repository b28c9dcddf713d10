"""Predict the step time of each measured configuration from measurements with two ranks.

The model is that of Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020,
section 3.2, with two additions for CPUs: ranks share cores, and an exchange over TCP takes CPU time itself. See
docs/scaling.md#the-model.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...common.link import Link
from ..alpha_beta import AlphaBeta, fit_alpha_beta
from ..rounds import Interval, median_of
from .configuration import FIT_RANKS, Alone, Configuration
from .gloo_ring import simulate_ring
from .measure import COLLECTIVES, Key, Round


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
    ready, delay = [], 0.0
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

    return Network(finish, cpu.seconds)


class Bound(NamedTuple):
    """Inputs of a prediction: as fitted, or all of them at the same end of their intervals."""

    spread: float  # the time of computations, relative to the median
    local: AlphaBeta
    link: AlphaBeta | None
    collectives: dict[str, AlphaBeta]


DISTURBED = 0.1  # share of the CPU time that other processes may use


@dataclass(frozen=True)
class Fits:
    """The inputs of the predictions: medians over the rounds of `usable_results`.

    Times of computations, and of exchanges on one node, are converted to a core for each thread: they are measured with
    `FIT_RANKS` ranks on the cores of this machine, and divided by `slowdown`.
    """

    slowdown: float  # how much longer the measurements took than with a core for each thread
    computation: dict[Alone, Computation]  # of a rank
    spread: tuple[float, float]  # shortest and longest computation, relative to the median
    local: AlphaBeta  # all-reduce among two ranks on one node, in seconds
    local_cpu: AlphaBeta  # CPU seconds of each rank in it
    link: AlphaBeta | None  # the same for two nodes and an unshaped link; None: not measured
    link_cpu: AlphaBeta | None
    collectives: dict[str, AlphaBeta] = field(default_factory=dict)  # others among two ranks on one node, in seconds

    def by_rows(self) -> dict[int, Computation]:
        """Return the computation under `ddp`, by the number of rows."""
        return {key.rows: computation for key, computation in self.computation.items() if key.strategy == "ddp"}

    def with_bounds(self, size: int) -> Iterator[Bound]:
        """Yield everything as fitted, at the lower bound and at the upper bound.

        The bounds are the fastest and the slowest round, and the exchanges' 95% prediction interval at a size in bytes.
        """
        yield Bound(1.0, self.local, self.link, self.collectives)
        for end, spread in enumerate(self.spread):
            yield Bound(
                spread,
                _at_bound(self.local, size, end),
                self.link and _at_bound(self.link, size, end),
                {name: _at_bound(line, size, end) for name, line in self.collectives.items()},
            )


def _at_bound(line: AlphaBeta, size: int, end: int) -> AlphaBeta:
    """Return the line through the lower (0) or upper (1) end of the prediction interval at a size."""
    return line.scaled(line.prediction_interval(size)[end] / line.seconds(size))


def usable_results(rounds: Sequence[Round], key: Key) -> list[Any]:
    """Return the results of the rounds with at most `DISTURBED` of the CPU time used by others; if none, of all."""
    calm = [measured[key].result for measured in rounds if measured[key].others <= DISTURBED]
    return calm or [measured[key].result for measured in rounds]


def rounds_used(rounds: Sequence[Round], key: Key) -> str:
    """Return how many rounds `usable_results` returns, such as `4 of 5`."""
    calm = sum(measured[key].others <= DISTURBED for measured in rounds)
    return f"{calm} of {len(rounds)}" if calm else f"all {len(rounds)}, disturbed"


def fit(rounds: Sequence[Round], cores: int, threads: int) -> Fits:
    """Fit the model to the measurements with two ranks of a number of threads each, on this machine's cores."""
    slowdown = Cores(cores, FIT_RANKS, threads).slowdown
    results = {key: usable_results(rounds, key) for key in rounds[0] if isinstance(key, Alone)}
    computation = {key: _median_computation(several) for key, several in results.items()}
    ratios = [result["seconds"] / computation[key].seconds for key, several in results.items() for result in several]
    local = usable_results(rounds, "local")
    link = usable_results(rounds, "link") if "link" in rounds[0] else None
    return Fits(
        slowdown,
        {key: median.scaled(1 / slowdown) for key, median in computation.items()},
        (min(ratios), max(ratios)),
        _fit_medians(local, "seconds").scaled(1 / slowdown),
        _fit_medians(local, "cpu_seconds"),
        _fit_medians(link, "seconds") if link else None,
        _fit_medians(link, "cpu_seconds") if link else None,
        {
            name: _fit_medians(usable_results(rounds, name), "seconds").scaled(1 / slowdown)
            for name in sorted({name for names in COLLECTIVES.values() for name in names} & set(rounds[0]))
        },
    )


def _median_computation(results: Sequence[dict[str, Any]]) -> Computation:
    buckets = [
        (size, statistics.median(result["buckets"][i][1] for result in results))
        for i, (size, _) in enumerate(results[0]["buckets"])
    ]
    return Computation(statistics.median(result["seconds"] for result in results), tuple(buckets))


def _fit_medians(rounds: Sequence[Sequence[dict[str, float]]], key: str) -> AlphaBeta:
    medians = [statistics.median(point[key] for point in points) for points in zip(*rounds, strict=True)]
    return fit_alpha_beta([point["bytes"] for point in rounds[0]], medians)


def predict(configuration: Configuration, fits: Fits, *, cores: int, threads: int) -> Interval:
    """Predict the time of a step with two or more ranks, and its bounds: see `Fits.with_bounds`."""
    # Two nodes are network namespaces, which share the cores of this machine.
    shared = Cores(cores, configuration.ranks, threads)
    computation = fits.computation[Alone(configuration.rows)]
    steps = []
    for spread, local, link, _ in fits.with_bounds(computation.size):
        if configuration.link is None:
            network = local_network(local, fits.local_cpu, shared)
        else:
            assert link is not None
            assert fits.link_cpu is not None
            network = two_nodes(configuration.link, link, fits.link_cpu)
        steps.append(predict_step(computation.scaled(spread), network, shared))
    return Interval(*steps)


def measured_interval(configuration: Configuration, rounds: Sequence[Round]) -> Interval:
    """Return the median, the shortest and the longest step of the rounds of `usable_results`."""
    return median_of([result["seconds"] for result in usable_results(rounds, configuration)])


def over(base: float, times: Interval) -> Interval:
    """Return the speedup (strong) or efficiency (weak) over one rank: T(1) / T(N) in either case."""
    return Interval(base / times.middle, base / times.high, base / times.low)
