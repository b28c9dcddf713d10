"""The tables and the chart of one model."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from ...common.charts import Series, points_with_ranges
from ...common.formats import mib
from ..page import Figure, Section, Table
from ..rounds import median_of
from .measure import OWN, Result, Round, as_data, ratio

ABOUT = (
    "Every recipe trains the same model with the same initial weights, rows and global batch, in turns within the same "
    "processes. docs/speed.md describes the recipes and how each number is measured."
)
ABOUT_RATIOS = "Medians of the ratios of the rounds, with the lowest and the highest."
ABOUT_CPU = "The same in CPU time of all threads, without waiting. Other programs on the machine disturb it less."
ABOUT_MEMORY = "The peak memory of the process, with all libraries: this job has only one recipe."


def section(name: str, title: str, results: Mapping[str, Result], *, on_cpu: bool) -> Section:
    """Describe the results of a model. `name` is its key in speed.json."""
    parts: list[Table | Figure] = [speeds(results)]
    ours = [own for own in OWN if own in results]
    if ours and len(results) > 1:
        title_of_ratios = f"how many times as fast {'they are' if len(ours) > 1 else 'it is'}"
        parts.append(ratios(title_of_ratios, ABOUT_RATIOS, results, value=lambda one: one.examples_per_second))
        if on_cpu:
            parts.append(ratios("in CPU time", ABOUT_CPU, results, value=lambda one: one.examples_per_cpu_second))
    points = {
        recipe: tuple(median_of([one.examples_per_second for one in result.rounds]))
        for recipe, result in results.items()
    }
    chart = points_with_ranges(
        f"{title}: examples per second",
        "examples per second",
        [Series("median and range of the rounds", points)],  # type: ignore[arg-type]
        show="{:g}".format,
        reference=0,
    )
    parts.append(Figure("examples per second", chart))
    return Section(name, title, [ABOUT], parts, as_data(results))


def speeds(results: Mapping[str, Result]) -> Table:
    header = ["recipe", "examples/s", "range", "real tokens/s", "padding", "MFU"]
    has_memory = any(result.peak_memory for result in results.values())
    rows = []
    for name, result in results.items():
        examples = median_of([one.examples_per_second for one in result.rounds])
        cells = [
            name,
            f"{examples.middle:.1f}",
            f"{examples.low:.1f} to {examples.high:.1f}",
            f"{result.median(lambda one: one.count.tokens / one.seconds):,.0f}",
            f"{result.padding:.1%}",
            f"{statistics.median(result.mfu):.1%}" if result.mfu else "–",
        ]
        rows.append(cells + ([", ".join(map(mib, result.peak_memory))] if has_memory else []))
    if has_memory:
        header.append("peak memory per rank, MiB")
    return Table("speed", header, rows, ABOUT_MEMORY if has_memory else "")


def ratios(title: str, note: str, results: Mapping[str, Result], *, value: Callable[[Round], float]) -> Table:
    """Return a table with a column for each recipe of this project, and a row for each recipe."""
    ours = [name for name in OWN if name in results]
    rows = [
        [other, *("1" if name == other else _ratio(results[name], theirs, value) for name in ours)]
        for other, theirs in results.items()
    ]
    return Table(title, ["compared with", *ours], rows, note)


def _ratio(ours: Result, theirs: Result, value: Callable[[Round], float]) -> str:
    middle, low, high = ratio(ours, theirs, value)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"
