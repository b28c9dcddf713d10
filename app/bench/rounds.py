"""Measure several things in alternating rounds, so that all are affected if the machine slows down."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

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
