"""Predict the step time of each measured configuration from measurements with two ranks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..alpha_beta import AlphaBeta, fit_alpha_beta
from ..rounds import Interval, median_of
from .measure import FIT_RANKS, Configuration, Key, Round
from .step_model import Computation, Cores, LocalNetwork, Network, TwoNodes, predict_step

DISTURBED = 0.1  # share of the CPU time that other processes may use


@dataclass(frozen=True)
class Fits:
    """What the predictions are made from: medians over the rounds of `usable_results`.

    Times of computations, and of exchanges on one node, are converted to a core for each thread: they are measured with
    `FIT_RANKS` ranks on the cores of this machine, and divided by `slowdown`.

    Attributes:
        slowdown: how much longer the measurements took than with a core for each thread.
        computation: of a rank, by its number of rows.
        spread: shortest and longest computation, relative to the median.
        local, local_cpu: all-reduce among two ranks on one node: seconds, and CPU seconds of each.
        link, link_cpu: the same for two nodes and an unshaped link; None: not measured.
    """

    slowdown: float
    computation: dict[int, Computation]
    spread: tuple[float, float]
    local: AlphaBeta
    local_cpu: AlphaBeta
    link: AlphaBeta | None
    link_cpu: AlphaBeta | None


def usable_results(rounds: Sequence[Round], key: Key) -> list[Any]:
    """Return the results of the rounds in which other processes used at most `DISTURBED` of the CPU time.

    If there is none, return the results of all rounds.
    """
    calm = [one[key].result for one in rounds if one[key].others <= DISTURBED]
    return calm or [one[key].result for one in rounds]


def rounds_used(rounds: Sequence[Round], key: Key) -> str:
    """Return how many rounds `usable_results` returns, such as `4 of 5`."""
    calm = sum(one[key].others <= DISTURBED for one in rounds)
    return f"{calm} of {len(rounds)}" if calm else f"all {len(rounds)}, disturbed"


def fit(rounds: Sequence[Round], cores: int, threads: int) -> Fits:
    """Fit the model to the measurements with at most two ranks.

    Args:
        cores: of this machine.
        threads: of each rank.
    """
    slowdown = Cores(cores, FIT_RANKS, threads).slowdown
    results = {rows: usable_results(rounds, rows) for rows in rounds[0] if isinstance(rows, int)}
    computation = {rows: _median_computation(several) for rows, several in results.items()}
    ratios = [one["seconds"] / computation[rows].seconds for rows, several in results.items() for one in several]
    local = usable_results(rounds, "local")
    link = usable_results(rounds, "link") if "link" in rounds[0] else None
    return Fits(
        slowdown,
        {rows: one.scaled(1 / slowdown) for rows, one in computation.items()},
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
    sizes = [point["bytes"] for point in rounds[0]]
    return fit_alpha_beta(sizes, [statistics.median(one[i][key] for one in rounds) for i in range(len(sizes))])


def predict(configuration: Configuration, fits: Fits, *, cores: int, threads: int) -> Interval:
    """Predict the time of a step with two or more ranks.

    Args:
        cores: of this machine, which all ranks share: also those of two nodes, which are network namespaces.
        threads: of each rank.

    Returns:
        The prediction, and its bounds: with the computation of the fastest and of the slowest round, and with
        exchanges at the bounds of the fit's 95% prediction interval.
    """
    shared = Cores(cores, configuration.ranks, threads)
    computation = fits.computation[configuration.rows]

    def network(end: int | None) -> Network:
        if configuration.link is None:
            return LocalNetwork(at_bound(fits.local, computation.size, end), fits.local_cpu, shared)
        assert fits.link is not None
        assert fits.link_cpu is not None
        link, wall = configuration.link, at_bound(fits.link, computation.size, end)
        return TwoNodes(link.bytes_per_second, link.delay, wall, fits.link_cpu)

    return Interval(
        predict_step(computation, network(None), shared),
        *(predict_step(computation.scaled(fits.spread[end]), network(end), shared) for end in (0, 1)),
    )


def at_bound(fit: AlphaBeta, size: int, end: int | None) -> AlphaBeta:
    """Return the line through the lower (0) or upper (1) end of the 95% prediction interval at a size."""
    return fit if end is None else fit.scaled(fit.prediction_interval(size)[end] / fit.seconds(size))


def measured_interval(configuration: Configuration, rounds: Sequence[Round]) -> Interval:
    """Return the median, the shortest and the longest step of the rounds of `usable_results`."""
    return median_of([one["seconds"] for one in usable_results(rounds, configuration)])


def over(base: float, one: Interval) -> Interval:
    """Return the speedup (strong) or efficiency (weak) over one rank: T(1) / T(N) in either case."""
    return Interval(base / one.middle, base / one.high, base / one.low)
