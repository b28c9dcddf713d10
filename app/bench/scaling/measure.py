"""Measure the predicted configurations, and the inputs of the predictions, in alternating rounds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from ...common.cores import usable_cores
from ...common.link import Link
from ...common.terminal import hides_progress
from ..link.nodes import NamespacesUnavailable, ShapedLink, shaped_link
from ..rounds import in_rounds
from .configuration import FIT_RANKS, Alone, Configuration, ScalingPlan
from .task_job import TaskJob, task_job

ALL_REDUCE_SIZES = tuple(4**n for n in range(6, 14))  # 4 KiB to 64 MiB
ALL_REDUCE_REPETITIONS = 5
# Of psutil.cpu_times(): guests are user time, too, and interrupts are mostly the packets of the jobs themselves.
NOT_COUNTED = ("idle", "iowait", "irq", "softirq", "guest", "guest_nice")


@dataclass(frozen=True)
class Measurement:
    """The result of a task, and the share of this process's cores that other processes used meanwhile."""

    result: Any
    others: float


# What a round measures, each of these once: a step of each configuration; for each number of rows per rank, a step of
# two ranks that exchange nothing; all-reduces of two ranks on this machine, and on two nodes with an unshaped link; and
# further collectives of two ranks on this machine.
Key = Configuration | Alone | str
# What the strategies call in addition to all-reduces.
COLLECTIVES = {"ddp": (), "zero1": ("broadcast",)} | dict.fromkeys(("zero2", "zero3"), ("all-gather", "all-to-all"))
Round = dict[Key, Measurement]


@dataclass(frozen=True)
class Jobs:
    """The open jobs: by the number of ranks on this machine, and one on two nodes with a rank each if they exist."""

    local: dict[int, TaskJob]
    nodes: tuple[TaskJob, ShapedLink] | None = None

    @property
    def everything(self) -> list[TaskJob]:
        return [*self.local.values(), *(self.nodes[:1] if self.nodes else [])]

    def cpu_seconds(self) -> float:
        """Return the CPU time that all jobs and the link have used so far."""
        of_link = self.nodes[1].cpu_seconds() if self.nodes else 0.0
        return sum(job.cpu_seconds() for job in self.everything) + of_link


@contextmanager
def open_jobs(plan: ScalingPlan, folder: Path) -> Iterator[Jobs]:
    """Start a job for each number of ranks, and one on two nodes; end them all at the end of the block.

    If this machine cannot have two nodes, this is printed and they are left out. The jobs' logs are in `folder`.
    """
    with ExitStack() as stack:
        nodes = None
        if plan.links:
            try:
                link = stack.enter_context(shaped_link())
            except NamespacesUnavailable as problem:
                print(f"not measured: two nodes: {problem}")
            else:
                start = task_job(plan, 1, log=folder / "nodes.log", namespaces=link.names)
                nodes = stack.enter_context(start), link
        local = {
            n: stack.enter_context(task_job(plan, n, log=folder / f"ranks-{n}.log"))
            for n in sorted({*plan.ranks, FIT_RANKS})
        }
        jobs = Jobs(local, nodes)
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
    rows = {key.rows for key in configurations if key.ranks > 1} | {plan.rows}
    if len(rows) == 1:  # the computation on a cluster is a straight line through two points or more
        rows.add(2 * plan.rows)
    keys: list[Key] = [Alone(n, strategy) for strategy in plan.strategies for n in sorted(rows)]
    keys += ["local", *sorted({name for strategy in plan.strategies for name in COLLECTIVES[strategy]})]
    keys += ["link"] if jobs.nodes is not None else []
    keys += configurations
    with tqdm(desc="measuring", unit=" jobs", total=plan.rounds * len(keys), disable=hides_progress()) as bar:

        def observe(key: Key, _: int) -> Measurement:
            """Measure, and see which share of the CPU time other processes use meanwhile."""
            began, busy_before, own_before = time.monotonic(), busy_seconds(), jobs.cpu_seconds()
            result = _perform(key, plan, jobs)
            others = busy_seconds() - busy_before - (jobs.cpu_seconds() - own_before)
            share = max(0.0, others / (len(usable_cores()) * (time.monotonic() - began)))
            bar.update()
            return Measurement(result, share)

        results = in_rounds({key: partial(observe, key) for key in keys}, plan.rounds)
    return [{key: results[key][number] for key in keys} for number in range(plan.rounds)]


def busy_seconds() -> float:
    """Return the CPU time that all processes together have used so far on the cores that this process may use."""
    usable = usable_cores()
    cores = psutil.cpu_times(percpu=True)  # only those that are online, so their positions may not be their numbers
    known = max(usable) < len(cores)
    counted = [times._asdict() for core, times in enumerate(cores) if core in usable or not known]
    return float(sum(seconds for times in counted for kind, seconds in times.items() if kind not in NOT_COUNTED))


def _perform(key: Key, plan: ScalingPlan, jobs: Jobs) -> Any:
    """Let a job measure something: see `Key`."""
    if isinstance(key, Configuration):
        job = jobs.local[key.ranks] if key.link is None else _shape(key.link, jobs)[0]
        steps = {"rows": key.rows, "strategy": key.strategy, "length": plan.length, "steps": plan.steps}
        return job.perform(exchange=True, **steps)
    two_ranks = jobs.local[FIT_RANKS]
    if isinstance(key, Alone):
        return two_ranks.perform(exchange=False, length=plan.length, steps=plan.steps, **key._asdict())
    if key == "link":
        nodes, link = _shape(Link(), jobs)
        return [_measure_link(size, nodes, link) for size in ALL_REDUCE_SIZES]
    collective = "all-reduce" if key == "local" else key
    return two_ranks.perform(collective=collective, sizes=ALL_REDUCE_SIZES, repeat=ALL_REDUCE_REPETITIONS)


def _shape(shape: Link, jobs: Jobs) -> tuple[TaskJob, ShapedLink]:
    """Shape the link between the nodes, and return their job and the link."""
    assert jobs.nodes is not None
    jobs.nodes[1].shape(shape)
    return jobs.nodes


def _measure_link(size: int, nodes: TaskJob, link: ShapedLink) -> dict[str, float]:
    """Time an all-reduce; count half of the CPU time that emulating the link takes as each rank's."""
    before = link.cpu_seconds()
    result: dict[str, float]
    (result,) = nodes.perform(collective="all-reduce", sizes=[size], repeat=ALL_REDUCE_REPETITIONS)
    emulation = (link.cpu_seconds() - before) / (ALL_REDUCE_REPETITIONS + 1) / 2
    return result | {"cpu_seconds": result["cpu_seconds"] + emulation}
