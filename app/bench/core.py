"""What the laboratories share: time calls in alternating rounds, show tables and charts, and write them as one page."""

from __future__ import annotations

import socket
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from markupsafe import Markup
from matplotlib.figure import Figure
from numpy.typing import NDArray
from tqdm import tqdm

from ..cli import command_line
from ..common.charts import MARKERS, render_svg
from ..common.files import write_json, write_text
from ..common.formats import markdown_cell, markdown_table, render_template, three_digits
from ..common.machine import describe_machine
from ..common.terminal import hides_progress
from ..distributed.collectives import all_gather_object, barrier, wait_for_device
from ..distributed.world import World
from ..settings import Settings
from ..training.build import ReviewData

ROUNDS, FEWEST_ROUNDS = 7, 3
MOST_CALLS = 100  # per round
Calls = Mapping[Any, Callable[[], object]]

# ---- times -----------------------------------------------------------------------------------------------------------


def alternate(calls: Calls, seconds: float, world: World, *, disable_tqdm: bool = True) -> pd.DataFrame:
    """Time calls, such as a collective or a training step, in rounds, every second one backwards. Collective.

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
    hide_bar = hides_progress(disable_tqdm, world.is_main_process)
    table = []
    for number in tqdm(range(rounds), "timing", unit=" rounds", disable=hide_bar, leave=False):
        order = -1 if number % 2 else 1
        table.append([measure(*one) for one in todo[::order]][::order])
    return pd.DataFrame(_slowest(table, world), columns=pd.Index(list(calls)))  # of tuples: a MultiIndex


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
    rounded = three_digits(seconds)
    if rounded < 1e-3:
        return f"{1e6 * rounded:g} µs"
    return f"{1e3 * rounded:g} ms" if rounded < 1 else f"{rounded:g} s"


# ---- the page --------------------------------------------------------------------------------------------------------


@dataclass
class Page:
    """Tables and charts: printed as they come, and written as a page, as Markdown and as JSON.

    Text, such as the name of a model, is untrusted: it is escaped in all three.
    """

    title: str
    facts: Mapping[str, str]  # about the machine and the job, by name
    folder: Path | None  # None: this rank is not the main process, and shows nothing
    settings: Mapping[str, Any] = field(default_factory=dict)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)  # their numbers, in full precision
    numbers: dict[str, Any] = field(default_factory=dict)  # of the current section
    parts: list[Markup] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        facts = ", ".join(f"{name} {value}" for name, value in self.facts.items())
        self._show(Markup(), f"# {self.title}: {markdown_cell(facts, len(facts))}")

    def section(self, name: str, title: str, about: str = "") -> None:
        """Begin a section. `name` is its key in the JSON file."""
        self.numbers = self.sections[name] = {}
        self._show(Markup("<h2>{}</h2>").format(title), f"## {markdown_cell(title)}")
        self.note(about)

    def note(self, text: str) -> None:
        if text:
            text = " ".join(text.split())
            self._show(Markup("<p>{}</p>").format(text), textwrap.fill(markdown_cell(text, len(text)), 100))

    def table(self, title: str, frame: pd.DataFrame, note: str = "") -> None:
        """Show a table whose first column is the index. Numbers that are not formatted get three decimals."""
        self._show(Markup("<h3>{}</h3>").format(title), f"### {markdown_cell(title)}")
        self.note(note)
        cells = frame.map(lambda cell: f"{cell:.3f}" if isinstance(cell, float) else str(cell))
        # The name of the columns is in the same line as theirs; that of the index would be in one of its own.
        cells = cells.rename_axis(index=None, columns=str(frame.index.name or ""))
        with pd.option_context("display.max_colwidth", None):  # otherwise long cells are cut off
            html = cells.to_html(classes="metrics", border=0)
        rows = [[name, *row] for name, row in zip(cells.index, cells.to_numpy(), strict=True)]
        header, *lines = ([markdown_cell(x) for x in row] for row in ([frame.index.name or "", *cells], *rows))
        text = markdown_table(header, lines, aligned=True)
        self._show(Markup('<div class="scroll">{}</div>').format(Markup(html)), text)

    def chart(self, title: str, frame: pd.DataFrame, label: str, *, log: bool = False) -> None:
        """Plot the columns as lines over the index, which are numbers. `label` is the axis of the values."""

        def draw(figure: Figure) -> None:
            axes = figure.add_subplot()
            for (name, values), marker in zip(frame.items(), cycle(MARKERS), strict=False):
                points = values.dropna()  # columns may have other rows
                axes.plot(points.index, points, marker=marker, markersize=4, label=str(name))
            axes.set(xlabel=str(frame.index.name or ""), ylabel=label)
            axes.set(**({"xscale": "log", "yscale": "log"} if log else {"ylim": (0, None)}))
            figure.legend(loc="outside lower center", ncols=2)

        if self.folder is not None:
            self._show(Markup("<figure>{}</figure>").format(render_svg(330, title, draw)))

    def _show(self, html: Markup, text: str = "") -> None:
        if self.folder is None:
            return
        self.parts.append(html)
        if text:
            self.text.append(text.rstrip() + "\n")
            print(self.text[-1], flush=True)

    def write(self, name: str) -> None:
        """Write the three files again: after each section, so that a later failure loses nothing."""
        if self.folder is None:
            return
        page = render_template("laboratory.html.j2", title=self.title, facts=self.facts, parts=self.parts, file=name)
        write_text(self.folder / f"{name}.html", page)
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
    seconds: float  # for which to time each call
    largest: int  # bytes of a tensor
    seeds: int  # trainings of each variant

    def times(self, calls: Calls, multiple: float = 1.0) -> pd.DataFrame:
        """Time calls as `alternate` does, for `multiple` times `seconds` each. Collective."""
        return alternate(calls, multiple * self.seconds, self.world, disable_tqdm=self.settings.disable_tqdm)


def describe_job(world: World) -> dict[str, str]:
    """Return facts about the machine and the job that every figure depends on, by name. Collective."""
    # Two nodes on one machine have the same name.
    nodes = max(len(set(all_gather_object(socket.gethostname(), world))), world.topology.nodes)
    return {
        "ranks": f"{world.size} on {nodes} node(s)",
        "backend": dist.get_backend(),
        "threads": f"{torch.get_num_threads()} per rank",
        **describe_machine(world.device),
        "command": command_line(),
    }
