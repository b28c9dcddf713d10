"""Measure recipes in alternating rounds, next to the peak of the device at the same time."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...common.machine import measure_peak_flops, peak_memory_bytes
from ...distributed.collectives import all_gather_object, barrier
from ...distributed.world import World
from ...flags import BF16
from ...record.results import mfu
from ...record.steps import Totals
from ...settings import Settings
from ..rounds import Interval, in_rounds, ratios
from ..steps import timed
from .others import OTHERS
from .own import TRAININGS, build_own
from .recipe import Count, Recipe, Task, precision_of

OWN = tuple(name + suffix for suffix in ("", BF16) for name in TRAININGS)


@dataclass(frozen=True)
class Round:
    """One round of one recipe."""

    seconds: float  # averaged over the ranks
    cpu_seconds: float  # of all threads of all ranks
    count: Count

    @property
    def examples_per_second(self) -> float:
        return self.count.examples / self.seconds

    @property
    def examples_per_cpu_second(self) -> float:
        return self.count.examples / self.cpu_seconds


@dataclass(frozen=True)
class Result:
    """All rounds of one recipe.

    Attributes:
        mfu: of each round; empty if the peak was not measured.
        peak_memory: of the process of each rank in bytes; empty unless there is only one recipe.
    """

    rounds: Sequence[Round]
    mfu: Sequence[float]
    peak_memory: Sequence[int] = ()

    def median(self, value: Callable[[Round], float]) -> float:
        return statistics.median(map(value, self.rounds))

    @property
    def padding(self) -> float:
        """Padding as a fraction of all tokens."""
        return 1 - sum(one.count.tokens for one in self.rounds) / sum(one.count.padded_tokens for one in self.rounds)


def measure(names: Sequence[str], task: Task, settings: Settings, *, folder: Path, world: World) -> dict[str, Result]:
    """Train with each of the recipes in alternating rounds, after one round that is not timed. Collective.

    Args:
        folder: for the files of the runs.
    """
    recipes = {}
    for name in names:
        build: Callable[..., Recipe] = build_own if name in OWN else OTHERS[name]
        recipes[name] = build(name, task, settings, folder=str(folder / name), world=world)
    measurements: dict[str, Callable[[int], Any]] = {
        name: partial(measure_round, recipe, task.steps, world=world) for name, recipe in recipes.items()
    }
    alone = len(names) == 1  # otherwise, the recipes share the memory of the process
    # Also in each round: the speed of the device may change from one minute to the next.
    precisions = () if alone else sorted({precision_of(name) for name in names})
    measurements |= {precision: partial(measure_peak, precision, world) for precision in precisions}
    measured = in_rounds(measurements, task.rounds - 1, warm_up=True)
    memory = all_gather_object(peak_memory_bytes(world.device), world) if alone else ()
    results = {}
    for name, recipe in recipes.items():
        peaks = measured.get(precision_of(name), [])
        used = [utilization(recipe, one, peak) for one, peak in zip(measured[name], peaks, strict=False)]
        results[name] = Result(measured[name], used, memory)
        recipe.end()
    recipes.clear()
    measurements.clear()
    gc.collect()  # DDP's modules are part of reference cycles, and each holds a complete model
    return results


def measure_round(recipe: Recipe, steps: int, number: int, *, world: World) -> Round:
    """Train for one round. Collective."""
    before = time.process_time()
    seconds = timed(lambda: recipe.train(steps), world)
    cpu_seconds = sum(all_gather_object(time.process_time() - before, world))
    return Round(seconds, cpu_seconds, recipe.count(steps))


def measure_peak(precision: str, world: World, number: int) -> float:
    """Return the peak of all ranks' devices together, measured at the same time on all of them. Collective."""
    barrier(world)
    return float(sum(all_gather_object(measure_peak_flops(world.device, precision), world)))


def utilization(recipe: Recipe, one: Round, peak: float) -> float:
    """Return the model FLOPs utilization of a round."""
    totals = Totals(train_seconds=one.seconds, tokens=one.count.tokens)
    used = mfu(recipe.model, totals, peak)
    assert used is not None
    return used


def ratio(ours: Result, theirs: Result, value: Callable[[Round], float]) -> Interval:
    """Return the median and the range of the rounds' ratios."""
    return ratios([value(one) for one in ours.rounds], [value(one) for one in theirs.rounds])


def as_data(results: Mapping[str, Result]) -> dict[str, Any]:
    """Return all numbers for speed.json."""
    return {
        name: {
            "rounds": [
                {"seconds": one.seconds, "cpu_seconds": one.cpu_seconds} | vars(one.count) for one in result.rounds
            ],
            "examples_per_second": result.median(lambda one: one.examples_per_second),
            "tokens_per_second": result.median(lambda one: one.count.tokens / one.seconds),
            "padding_fraction": result.padding,
            "mfu": statistics.median(result.mfu) if result.mfu else None,
            "mfu_of_rounds": list(result.mfu),
            "peak_memory_bytes": list(result.peak_memory) or None,
            "times_as_fast_as": {
                other: ratio(result, theirs, lambda one: one.examples_per_second)._asdict()
                for other, theirs in results.items()
                if other != name
            },
        }
        for name, result in results.items()
    }
