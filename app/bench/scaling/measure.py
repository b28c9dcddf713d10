"""Measure what `app.bench.scaling` predicts, and what it predicts it from, in alternating rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil
from tqdm import tqdm

from ...common.machine import usable_cores
from ...common.progress import hides_progress
from ..rounds import in_rounds
from .links.namespaces import NamespacesUnavailable
from .links.shaped_link import Link, ShapedLink, shaped_link
from .task_job import TaskJob, task_job

MODES = ("strong", "weak")
FIT_RANKS = 2  # the fit sees no more than two ranks
ALL_REDUCE_SIZES = tuple(4**n for n in range(6, 14))  # 4 KiB to 64 MiB
ALL_REDUCE_REPETITIONS = 5
# Of psutil.cpu_times(): guests are user time, too, and interrupts are mostly the packets of the jobs themselves.
NOT_COUNTED = ("idle", "iowait", "irq", "softirq", "guest", "guest_nice")


@dataclass(frozen=True)
class Configuration:
    """Ranks that train together.

    Attributes:
        mode: `strong` (the rows of a step are divided among the ranks) or `weak` (each rank has a number of rows).
        ranks: on this machine, or one on each of two nodes if there is a link.
        rows: of each rank in a step.
        link: between the two nodes.
    """

    mode: str
    ranks: int
    rows: int
    link: Link | None = None

    def __str__(self) -> str:
        return f"{self.mode}, {self.ranks} rank(s), " + ("one node" if self.link is None else str(self.link))


@dataclass(frozen=True)
class Measurement:
    """What a task has measured.

    Attributes:
        result: from `app.bench.scaling.job`.
        others: share of the CPU time of this process's cores that other processes used meanwhile.
    """

    result: Any
    others: float


# What a round measures, each of these once: a step of each configuration; for each number of rows per rank, a step of
# two ranks that exchange nothing; and all-reduces of two ranks on this machine, and on two nodes with an unshaped link.
Key = Configuration | int | Literal["local", "link"]
Round = dict[Key, Measurement]


@dataclass(frozen=True)
class ScalingPlan:
    """What to measure.

    Attributes:
        size: the model, a key of `harness.SIZES`.
        batch: rows of a step in strong scaling.
        rows: rows of each rank in weak scaling.
        length: tokens of a row.
        steps: of a configuration in each round.
    """

    size: str
    ranks: Sequence[int]
    links: Sequence[Link]
    batch: int
    rows: int
    length: int
    steps: int
    rounds: int
    threads: int

    def configurations(self, links: bool) -> list[Configuration]:
        """Return all configurations, with or without those of two nodes."""
        local = [Configuration(mode, n, self._rows(mode, n)) for n in self.ranks for mode in MODES]
        nodes = [Configuration(mode, 2, self._rows(mode, 2), link) for link in self.links for mode in MODES]
        return local + (nodes if links else [])

    def _rows(self, mode: str, ranks: int) -> int:
        return self.batch // ranks if mode == "strong" else self.rows


@dataclass(frozen=True)
class Jobs:
    """The open jobs.

    Attributes:
        local: by the number of ranks, on this machine.
        nodes: on two nodes, one rank each; None: not measured.
        link: between them.
    """

    local: dict[int, TaskJob]
    nodes: TaskJob | None = None
    link: ShapedLink | None = None

    @property
    def everything(self) -> list[TaskJob]:
        """All jobs."""
        return [*self.local.values(), *([self.nodes] if self.nodes else [])]

    def cpu_seconds(self) -> float:
        """Return the CPU time that all jobs and the link have used so far."""
        return sum(job.cpu_seconds() for job in self.everything) + (self.link.cpu_seconds() if self.link else 0.0)


@contextmanager
def open_jobs(plan: ScalingPlan, folder: Path) -> Iterator[Jobs]:
    """Start a job for each number of ranks, and one on two nodes; end them all at the end of the block.

    If this machine can't have two nodes, this is printed and they are left out.

    Args:
        folder: for the logs.
    """
    with ExitStack() as stack:
        link = None
        if plan.links:
            try:
                link = stack.enter_context(shaped_link())
            except NamespacesUnavailable as problem:
                print(f"not measured: two nodes: {problem}")
        local = {
            n: stack.enter_context(task_job(plan.size, n, plan.threads, log=folder / f"ranks-{n}.log"))
            for n in sorted({*plan.ranks, FIT_RANKS})
        }
        nodes = None
        if link is not None:
            nodes = stack.enter_context(
                task_job(plan.size, 1, plan.threads, log=folder / "nodes.log", namespaces=link.names)
            )
        jobs = Jobs(local, nodes, link)
        for job in tqdm(jobs.everything, desc="starting", unit=" jobs", leave=False, disable=hides_progress()):
            job.connect()
        yield jobs
        for job in jobs.everything:
            job.close()
        for job in jobs.everything:
            job.wait()


def measure(plan: ScalingPlan, jobs: Jobs) -> list[Round]:
    """Measure everything once per round. Every second round has the opposite order."""
    configurations = plan.configurations(links=jobs.nodes is not None)
    rows = {one.rows for one in configurations if one.ranks > 1} | {plan.rows}
    if len(rows) == 1:  # the computation on a cluster is a straight line through two points or more
        rows.add(2 * plan.rows)
    keys: list[Key] = [*sorted(rows), "local"]
    keys += ["link"] if jobs.nodes is not None else []
    keys += configurations
    with tqdm(desc="measuring", unit=" jobs", total=plan.rounds * len(keys), disable=hides_progress()) as bar:

        def observe(key: Key, _: int) -> Measurement:
            measurement = _observe(partial(_perform, key, plan, jobs), jobs)
            bar.update()
            return measurement

        results = in_rounds({key: partial(observe, key) for key in keys}, plan.rounds)
    return [{key: results[key][number] for key in keys} for number in range(plan.rounds)]


def _observe(work: Callable[[], Any], jobs: Jobs) -> Measurement:
    """Do something, and measure which share of the CPU time other processes have used meanwhile."""
    began, busy_before, own_before = time.monotonic(), busy_seconds(), jobs.cpu_seconds()
    result = work()
    others = busy_seconds() - busy_before - (jobs.cpu_seconds() - own_before)
    return Measurement(result, max(0.0, others / (len(usable_cores()) * (time.monotonic() - began))))


def busy_seconds() -> float:
    """Return the CPU time that all processes together have used so far on the cores that this process may use."""
    usable = usable_cores()
    cores = psutil.cpu_times(percpu=True)  # only those that are online, so their positions may not be their numbers
    known = max(usable) < len(cores)
    times = [one._asdict() for core, one in enumerate(cores) if core in usable or not known]
    return float(sum(seconds for core in times for kind, seconds in core.items() if kind not in NOT_COUNTED))


def _perform(key: Key, plan: ScalingPlan, jobs: Jobs) -> Any:
    """Let a job measure something: see `Key`."""
    steps = {"length": plan.length, "steps": plan.steps}
    if isinstance(key, int):
        return jobs.local[FIT_RANKS].perform(rows=key, exchange=False, **steps)
    if key == "local":
        return jobs.local[FIT_RANKS].perform(sizes=ALL_REDUCE_SIZES, repeat=ALL_REDUCE_REPETITIONS)
    if isinstance(key, Configuration) and key.link is None:
        return jobs.local[key.ranks].perform(rows=key.rows, exchange=True, **steps)
    assert jobs.nodes is not None
    assert jobs.link is not None
    if isinstance(key, Configuration) and key.link is not None:
        jobs.link.shape(key.link)
        return jobs.nodes.perform(rows=key.rows, exchange=True, **steps)
    jobs.link.shape(Link())
    return [_measure_link(size, jobs.nodes, jobs.link) for size in ALL_REDUCE_SIZES]


def _measure_link(size: int, nodes: TaskJob, link: ShapedLink) -> dict[str, float]:
    """Time an all-reduce; count half of the CPU time that emulating the link takes as each rank's."""
    before = link.cpu_seconds()
    result: dict[str, float]
    (result,) = nodes.perform(sizes=[size], repeat=ALL_REDUCE_REPETITIONS)
    emulation = (link.cpu_seconds() - before) / (ALL_REDUCE_REPETITIONS + 1) / 2
    return result | {"cpu_seconds": result["cpu_seconds"] + emulation}
