"""Measure several things in alternating rounds, so that all are affected if the machine slows down."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from tqdm import tqdm

from ..common.terminal import hides_progress
from ..distributed.collectives import all_gather_object, barrier, wait_for_device
from ..distributed.world import World

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class Interval(NamedTuple):
    """A value, such as a time in seconds, with the bounds between which it is expected or has been measured."""

    middle: float
    low: float
    high: float


def in_rounds(
    measurements: Mapping[Key, Callable[[int], Result]], rounds: int, warm_up: bool = False
) -> dict[Key, list[Result]]:
    """Make each measurement once per round, in every second round in the opposite order.

    Args:
        measurements: called with the number of the round, from 0 up.
        warm_up: make one more round at the beginning, whose results do not count.
    """
    results: dict[Key, list[Result]] = {key: [] for key in measurements}
    for number in range(rounds + warm_up):
        for key in list(measurements)[:: -1 if number % 2 else 1]:
            results[key].append(measurements[key](number))
    return {key: several[warm_up:] for key, several in results.items()}


def median_of(values: Sequence[float]) -> Interval:
    """Return the median, the lowest and the highest value."""
    return Interval(statistics.median(values), min(values), max(values))


def ratios(seconds: Sequence[float], baseline: Sequence[float]) -> Interval:
    """Return the median and the range of the rounds' ratios. What takes long may have fewer rounds than the other."""
    return median_of([ours / theirs for ours, theirs in zip(seconds, baseline, strict=False)])


ROUNDS, FEWEST_ROUNDS = 7, 3
MOST_CALLS = 100  # per round


def time_calls(
    calls: Mapping[Key, Callable[[], object]], seconds_per_call: float, world: World, *, disable_tqdm: bool = False
) -> dict[Key, list[float]]:
    """Time calls, such as a collective or a training step, in rounds. Collective.

    A short call is repeated within a round, and the repetitions start one after another without a barrier, as in
    nccl-tests. If the time is not enough for `ROUNDS`, a call is timed in `FEWEST_ROUNDS` at least.

    Args:
        calls: in the same order on every rank.
        seconds_per_call: about how long to time each of them, all rounds together.

    Returns:
        The seconds that each call takes on the slowest rank, in each round.
    """
    hide_bar = hides_progress(disable_tqdm, world.is_main_process)
    with tqdm(desc="timing", unit=" calls", disable=hide_bar, leave=False) as bar:
        bar.total = len(calls) * (ROUNDS + 1)
        estimates = {}
        for key, call in calls.items():
            call()  # allocates memory and connects to other ranks
            estimates[key] = time_repeated(call, 1, world)
            bar.update()
        slowest = dict(zip(calls, _slowest_rank(list(estimates.values()), world), strict=True))

        def measure(key: Key, round_number: int) -> float | None:
            bar.update()
            affordable = seconds_per_call / max(slowest[key], 1e-9)
            if round_number >= max(FEWEST_ROUNDS, affordable):
                return None
            repetitions = min(MOST_CALLS, max(1, math.floor(affordable / ROUNDS)))
            return time_repeated(calls[key], repetitions, world)

        measured = in_rounds({key: partial(measure, key) for key in calls}, ROUNDS)
        finished = {key: [seconds for seconds in rounds if seconds is not None] for key, rounds in measured.items()}
    flat = iter(_slowest_rank([seconds for rounds in finished.values() for seconds in rounds], world))
    return {key: [next(flat) for _ in rounds] for key, rounds in finished.items()}


def time_repeated(call: Callable[[], object], repetitions: int, world: World) -> float:
    """Return the seconds that one of several repetitions takes on this rank, once all ranks are ready. Collective."""
    barrier(world)
    if world.device.type == "cuda":
        # The device's clock: the host only enqueues the collectives.
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        for _ in range(repetitions):
            call()
        ended.record()
        wait_for_device(world)
        return float(started.elapsed_time(ended)) / 1000 / repetitions
    before = time.perf_counter()
    for _ in range(repetitions):
        call()
    return (time.perf_counter() - before) / repetitions


def _slowest_rank(seconds: list[float], world: World) -> list[float]:
    """Return the maximum over the ranks of each number. Collective."""
    return [float(slowest) for slowest in np.max(all_gather_object(seconds, world), axis=0)]
