"""Divide the time of profiled training steps among data wait, computation and communication.

The input is what torch.profiler has recorded on one rank that trains on a CPU. Every moment of a step belongs to
exactly one of the parts that docs/communication.md#where-the-time-of-a-step-goes---profile defines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..strategies.base import CLIP, FORWARD, MICRO_BATCH, START_CLOCK

Interval = tuple[int, int]  # start and end, in nanoseconds, as all times here
Moments = NDArray[np.bool_]  # of a step: whether each microsecond of it belongs to a set
RESOLUTION = 1000  # nanoseconds in each of them

EXPOSED = "exposed communication"
CATEGORIES = ("data wait", "forward", "backward", EXPOSED, "optimizer", "other")
# Between two operators, Python and the profiler itself take time. Shorter pauses count as computation, not as waiting.
SHORTEST_WAIT = 50_000
NOT_OPERATORS = ("c10d", "autograd", "torch")  # namespaces of events that contain operators, or waits


@dataclass(frozen=True)
class Event:
    """Something that the profiler has recorded on the host."""

    name: str
    start: int
    end: int
    thread: int = 0  # an id
    is_annotation: bool = False  # whether it is a range of `record_function` and not an operator


def union(intervals: Iterable[Interval], step: Interval, gap: int = 0) -> Moments:
    """Return the microseconds of a step that belong to any of some intervals, or to a pause of at most `gap`."""
    ordered = sorted(intervals)
    ends = accumulate((end for _, end in ordered), max)
    pauses = [(end, start) for end, (start, _) in zip(ends, ordered[1:], strict=False) if end < start <= end + gap]
    moments = np.zeros((step[1] - step[0]) // RESOLUTION, dtype=bool)
    for start, end in (*ordered, *pauses):
        moments[max(start - step[0], 0) // RESOLUTION : max(end - step[0], 0) // RESOLUTION] = True
    return moments


def divide_steps(events: Sequence[Event]) -> pd.DataFrame:
    """Return the times of the steps between two calls of the profiler's `step()`, in order.

    Returns:
        A row per step, in milliseconds: its parts, which are `CATEGORIES`; `step`, their sum; and `communication`, the
        time in which at least one collective of the step was in flight, exposed or hidden behind computation.
    """
    windows = [event for event in events if event.is_annotation and event.name.startswith("ProfilerStep")]
    main_thread = windows[0].thread
    collectives = in_flight(events)
    steps = []
    for window in sorted(windows, key=attrgetter("start")):
        near = [e for e in events if e.end >= window.start - SHORTEST_WAIT and e.start <= window.end + SHORTEST_WAIT]
        on_main_thread = [event for event in near if event.thread == main_thread]
        annotations = [e for e in on_main_thread if e.is_annotation and window.start <= e.start < window.end]
        clock = [e.end for e in annotations if e.name == START_CLOCK]
        start = max(clock, default=window.start)  # a checkpoint or an evaluation is not part of the step
        step = (start, window.end)
        host = host_parts(annotations, step)
        operators = union(((e.start, e.end) for e in on_main_thread if _is_operator(e)), step, SHORTEST_WAIT)
        # Collectives that are started in other parts, such as the check for stop requests, are not the step's.
        waited_for = {*np.flatnonzero(host["forward"] | host["backward"] | host["optimizer"]).tolist()}
        communication = union((call for call in collectives if (call[0] - start) // RESOLUTION in waited_for), step)
        exposed = communication & ~operators
        # While nothing is computed and no collective is in flight, the time belongs to what the host does.
        parts = {name: part & ~exposed for name, part in host.items()} | {EXPOSED: exposed}
        sets = {name: parts[name] for name in CATEGORIES}
        sets |= {"step": np.ones_like(exposed), "communication": communication}
        steps.append({name: float(moments.sum()) * RESOLUTION / 1e6 for name, moments in sets.items()})
    return pd.DataFrame(steps)


def host_parts(annotations: Sequence[Event], step: Interval) -> dict[str, Moments]:
    """Return when the host is in each part of a step, from the annotations of the main thread.

    The parts are disjoint and cover the step.
    """
    forward, backward = [], []
    for batch in annotations:
        if batch.name == MICRO_BATCH:
            ends = [e.end for e in annotations if e.name in FORWARD and batch.start <= e.start <= batch.end]
            boundary = max(ends, default=batch.end)
            forward.append((batch.start, boundary))
            backward.append((boundary, batch.end))
    data_wait = [(e.start, e.end) for e in annotations if e.name.startswith("enumerate(DataLoader)")]
    optimizer = [(e.start, e.end) for e in annotations if e.name == CLIP or e.name.startswith("Optimizer.")]
    intervals = {"data wait": data_wait, "forward": forward, "backward": backward, "optimizer": optimizer}
    parts = {name: union(of_part, step) for name, of_part in intervals.items()}
    return parts | {"other": ~np.logical_or.reduce(list(parts.values()))}


def in_flight(events: Iterable[Event]) -> list[Interval]:
    """Return when each collective over gloo is in flight: (its call, its completion).

    gloo's threads record a collective only when they begin with it, in the order of the calls.
    """
    calls: dict[str, list[Event]] = {}
    runs: dict[str, list[Event]] = {}
    for event in sorted(events, key=attrgetter("start")):
        backend, _, name = event.name.replace("gloo:", "gloo::").partition("::")
        kind = name.replace("_", "").removesuffix("base")
        if backend == "c10d":
            calls.setdefault(kind, []).append(event)
        elif backend == "gloo":
            runs.setdefault(kind, []).append(event)
    intervals = []
    for kind, started in calls.items():
        waiting = iter(runs.get(kind, []))
        for call in started:
            # Whatever runs before the first call was called before the profiler began.
            run = next((run for run in waiting if run.start >= call.start), call)
            intervals.append((call.start, max(call.end, run.end)))
    return intervals


def _is_operator(event: Event) -> bool:
    namespace, separator, _ = event.name.partition("::")
    return not event.is_annotation and bool(separator) and namespace not in NOT_OPERATORS
