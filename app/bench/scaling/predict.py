"""Predict the step time of each measured configuration from measurements with two ranks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..alpha_beta import AlphaBeta, fit_alpha_beta
from ..rounds import Interval, median_of
from .measure import FIT_RANKS, Configuration, Key, Round
from .step_model import Computation, Cores, local_network, predict_step, two_nodes

DISTURBED = 0.1  # share of the CPU time that other processes may use


@dataclass(frozen=True)
class Fits:
    """The inputs of the predictions: medians over the rounds of `usable_results`.

    Times of computations, and of exchanges on one node, are converted to a core for each thread: they are measured with
    `FIT_RANKS` ranks on the cores of this machine, and divided by `slowdown`.
    """

    slowdown: float  # how much longer the measurements took than with a core for each thread
    computation: dict[int, Computation]  # of a rank, by its number of rows
    spread: tuple[float, float]  # shortest and longest computation, relative to the median
    local: AlphaBeta  # all-reduce among two ranks on one node, in seconds
    local_cpu: AlphaBeta  # CPU seconds of each rank in it
    link: AlphaBeta | None  # the same for two nodes and an unshaped link; None: not measured
    link_cpu: AlphaBeta | None

    def with_bounds(self, size: int) -> Iterator[tuple[float, AlphaBeta, AlphaBeta | None]]:
        """Yield the relative time of computations, `local` and `link`: as fitted, at the lower and the upper bound.

        The bounds are the fastest and the slowest round, and the exchanges' 95% prediction interval at a size in bytes.
        """
        yield 1.0, self.local, self.link
        for end, spread in enumerate(self.spread):
            yield spread, _at_bound(self.local, size, end), self.link and _at_bound(self.link, size, end)


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
    results = {rows: usable_results(rounds, rows) for rows in rounds[0] if isinstance(rows, int)}
    computation = {rows: _median_computation(several) for rows, several in results.items()}
    ratios = [result["seconds"] / computation[rows].seconds for rows, several in results.items() for result in several]
    local = usable_results(rounds, "local")
    link = usable_results(rounds, "link") if "link" in rounds[0] else None
    return Fits(
        slowdown,
        {rows: median.scaled(1 / slowdown) for rows, median in computation.items()},
        (min(ratios), max(ratios)),
        _fit_medians(local, "seconds").scaled(1 / slowdown),
        _fit_medians(local, "cpu_seconds"),
        _fit_medians(link, "seconds") if link else None,
        _fit_medians(link, "cpu_seconds") if link else None,
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
    computation = fits.computation[configuration.rows]
    steps = []
    for spread, local, link in fits.with_bounds(computation.size):
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
