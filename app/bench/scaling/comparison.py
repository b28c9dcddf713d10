"""Measured next to predicted times of a step, as cells of a table and as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..charts import format_seconds
from ..rounds import Interval
from .configuration import Configuration

COLUMNS = ("rows per rank", "rounds", "measured", "range", "predicted", "interval", "error")

ABOUT_SUPERLINEAR = (
    "Where a measured speedup exceeds the number of ranks, the efficiency is shown as 100%: the steps of one rank were "
    "disturbed, or the smaller share of the batch fits the caches better."
)


class Comparison(NamedTuple):
    """The time of a step: measured, predicted (None for one rank), and the number of rounds that were used."""

    measured: Interval
    predicted: Interval | None
    used: str


Comparisons = Mapping[Configuration, Comparison]


def cells(key: Configuration, comparison: Comparison) -> list[str]:
    """Return the cells of `COLUMNS`."""
    measured, predicted, used = comparison
    cells = [str(key.rows), used, format_seconds(measured.middle), _range(measured)]
    if predicted is None:
        return [*cells, "", "", ""]
    error = predicted.middle / measured.middle - 1
    return [*cells, format_seconds(predicted.middle), _range(predicted), f"{error:+.1%}"]


def measured_speedup(key: Configuration, measured: Interval, base: Interval | None) -> list[str]:
    """Return the cells for speedup and efficiency. `base`: the measured step of one rank, if there is one."""
    if base is None:
        return ["", ""]
    speedup = _speedup(key, measured, base)
    return [f"{speedup:.2f}", f"{min(1.0, speedup / key.ranks):.0%}"]


def about_efficiency(comparisons: Comparisons, base: Interval | None) -> str:
    """Return a note for a table in which a measured speedup exceeds the number of ranks; otherwise nothing."""
    above = base and any(_speedup(key, found.measured, base) > key.ranks for key, found in comparisons.items())
    return ABOUT_SUPERLINEAR if above else ""


def _speedup(key: Configuration, measured: Interval, base: Interval) -> float:
    return base.middle / measured.middle * (key.ranks if key.mode == "weak" else 1)


def _range(times: Interval) -> str:
    return f"{format_seconds(times.low)} to {format_seconds(times.high)}"


def numbers(comparisons: Comparisons) -> dict[str, Any]:
    return {
        str(key): {
            "ranks": key.ranks,
            "rows_per_rank": key.rows,
            "measured": comparison.measured._asdict(),
            "predicted": comparison.predicted and comparison.predicted._asdict(),
        }
        for key, comparison in comparisons.items()
    }
