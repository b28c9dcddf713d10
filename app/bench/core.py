"""What the laboratories share: time calls in alternating rounds, and show and write their tables."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ..cli import command_line
from ..common.files import write_json, write_text
from ..common.formats import markdown_cell, markdown_table
from ..common.machine import describe_machine
from ..distributed.collectives import all_gather_object, barrier, wait_for_device
from ..distributed.world import World
from ..settings import Settings
from ..training.build import ReviewData

ROUNDS, FEWEST_ROUNDS = 7, 3
MOST_CALLS = 100  # per round

# ---- times -----------------------------------------------------------------------------------------------------------


def alternate(calls: Mapping[str, Callable[[], object]], seconds: float, world: World) -> pd.DataFrame:
    """Time calls, such as training steps, in rounds, every second one backwards. Collective.

    All calls are part of each round, so a moment in which the machine is slow affects all of them alike.

    Args:
        calls: the same ones on every rank, in the same order.
        seconds: about how long to time each call, all rounds together.

    Returns:
        Seconds per call on the slowest rank: a row for each round, a column for each call.
    """

    def measure(call: Callable[[], object], repetitions: int) -> float:
        barrier(world)
        began = time.perf_counter()
        for _ in range(repetitions):  # one after another without a barrier, as in nccl-tests
            call()
        wait_for_device(world)
        return (time.perf_counter() - began) / repetitions

    for call in calls.values():
        call()  # allocates memory and connects to other ranks
    estimates = _slowest([[measure(call, 1) for call in calls.values()]], world)[0]
    rounds = int(min(ROUNDS, max(FEWEST_ROUNDS, seconds * len(calls) / estimates.sum())))
    repetitions = np.clip(seconds / rounds / estimates, 1, MOST_CALLS).astype(int).tolist()
    todo = list(zip(calls.values(), repetitions, strict=True))
    table = []
    for number in range(rounds):
        order = -1 if number % 2 else 1
        table.append([measure(*one) for one in todo[::order]][::order])
    return pd.DataFrame(_slowest(table, world), columns=list(calls))


def _slowest(rows: list[list[float]], world: World) -> NDArray[np.float64]:
    """Return the maximum over the ranks of each number. Collective."""
    slowest: NDArray[np.float64] = np.max(all_gather_object(rows, world), axis=0)
    return slowest


def compared(times: pd.DataFrame, unit: str = "step") -> pd.DataFrame:
    """Compare each column with the first one: its median time, and the median and the range of the rounds' ratios."""
    ratios = times.div(times.iloc[:, 0], axis=0)
    columns = {f"time per {unit}": times.median().map(format_seconds), "relative": ratios.median()}
    return pd.DataFrame(columns | {"lowest": ratios.min(), "highest": ratios.max()})


def format_seconds(seconds: float) -> str:
    """Return a time with three digits and a unit, such as 52.1 µs."""
    rounded = float(f"{seconds:.3g}")
    if rounded < 1e-3:
        return f"{1e6 * rounded:g} µs"
    return f"{1e3 * rounded:g} ms" if rounded < 1 else f"{rounded:g} s"


# ---- the page --------------------------------------------------------------------------------------------------------


@dataclass
class Page:
    """Tables: printed as they come, and written as Markdown; and all numbers, as JSON.

    Text, such as the name of a model, is untrusted: it is escaped.
    """

    title: str
    facts: Mapping[str, str]  # about the machine and the job, by name
    folder: Path | None  # None: this rank is not the main process, and shows nothing
    settings: Mapping[str, Any] = field(default_factory=dict)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)  # their numbers, in full precision
    numbers: dict[str, Any] = field(default_factory=dict)  # of the current section
    text: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        facts = ", ".join(f"{name} {value}" for name, value in self.facts.items())
        self._show(f"# {self.title}: {markdown_cell(facts, len(facts))}")

    def section(self, name: str, title: str, about: str = "") -> None:
        """Begin a section. `name` is its key in the JSON file."""
        self.numbers = self.sections[name] = {}
        self._show(f"## {markdown_cell(title)}")
        self.note(about)

    def note(self, text: str) -> None:
        if text := " ".join(text.split()):
            self._show(textwrap.fill(markdown_cell(text, len(text)), 100))

    def table(self, title: str, frame: pd.DataFrame, note: str = "") -> None:
        """Show a table whose first column is the index. Numbers that are not formatted get three decimals."""
        self._show(f"### {markdown_cell(title)}")
        self.note(note)
        cells = frame.map(lambda cell: f"{cell:.3f}" if isinstance(cell, float) else str(cell))
        rows = [[frame.index.name or "", *cells], *zip(cells.index, *cells.to_numpy().T, strict=True)]
        header, *lines = ([markdown_cell(cell) for cell in row] for row in rows)
        self._show(markdown_table(header, lines, aligned=True))

    def _show(self, text: str) -> None:
        if self.folder is not None:
            self.text.append(text.rstrip() + "\n")
            print(self.text[-1], flush=True)

    def write(self, name: str) -> None:
        """Write both files again: after each section, so that a later failure loses nothing."""
        if self.folder is not None:
            write_text(self.folder / f"{name}.md", "\n".join(self.text))
            content = {"machine": self.facts, "settings": self.settings, "sections": self.sections}
            write_json(self.folder / f"{name}.json", content)


@dataclass(kw_only=True)
class Lab:
    """What the sections measure with, and the page that they show their results on."""

    page: Page
    settings: Settings
    world: World
    data: ReviewData
    seconds: float  # --seconds_per_point
    seeds: int  # trainings of each variant


def describe_job(world: World) -> dict[str, str]:
    """Return facts about the machine and the job that every figure depends on, by name. Collective."""
    nodes = sum(all_gather_object(world.local_rank == 0, world))
    return {
        "ranks": f"{world.size} on {nodes} node(s)",
        "backend": dist.get_backend(),
        "threads": f"{torch.get_num_threads()} per rank",
        **describe_machine(world.device),
        "command": command_line(),
    }
