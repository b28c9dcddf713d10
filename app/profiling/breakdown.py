"""Divide the time of profiled training steps among data wait, computation and communication.

The input is what torch.profiler has recorded on one rank that trains on a CPU. Every moment of a step belongs to
exactly one of the parts that docs/train.md#where-the-time-of-a-step-goes defines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler_util import FunctionEvent

from ..strategies.base import CLIP, FORWARD, MICRO_BATCH, START_CLOCK

Interval = tuple[int, int]  # start and end, in microseconds, as all times here
Moments = NDArray[np.bool_]  # of a step: whether each microsecond of it belongs to a set

EXPOSED = "exposed communication"
CATEGORIES = ("data wait", "forward", "backward", EXPOSED, "optimizer", "other")
# Between two operators, Python and the profiler itself take time. Shorter pauses count as computation, not as waiting.
SHORTEST_WAIT = 50
NOT_OPERATORS = ("c10d::", "autograd::", "torch::")  # events that contain operators, or waits


def span(event: FunctionEvent) -> Interval:
    return round(event.time_range.start), round(event.time_range.end)


def union(intervals: Iterable[Interval], step: Interval, gap: int = 0) -> Moments:
    """Return the microseconds of a step that belong to any of some intervals, or to a pause of at most `gap`."""
    ordered = sorted(i for i in intervals if i[1] >= step[0] - gap and i[0] <= step[1] + gap)
    ends = accumulate((end for _, end in ordered), max)
    pauses = [(end, start) for end, (start, _) in zip(ends, ordered[1:], strict=False) if end < start <= end + gap]
    moments = np.zeros(step[1] - step[0], dtype=bool)
    for start, end in (*ordered, *pauses):
        moments[max(start - step[0], 0) : max(end - step[0], 0)] = True
    return moments


def divide_steps(events: Iterable[FunctionEvent]) -> pd.DataFrame:
    """Return the times of the steps between two calls of the profiler's `step()`, in order.

    Args:
        events: what the profiler's `events()` returns.

    Returns:
        A row per step, in milliseconds: its parts, which are `CATEGORIES`; `step`, their sum; and `communication`, the
        time in which at least one collective of the step was in flight, exposed or hidden behind computation.
    """
    on_host = sorted((event for event in events if event.device_type == DeviceType.CPU), key=span)
    windows = [event for event in on_host if event.is_user_annotation and event.name.startswith("ProfilerStep")]
    on_main_thread = [event for event in on_host if event.thread == windows[0].thread]
    recorded = [event for event in on_main_thread if "::" in event.name and not event.is_user_annotation]
    operators = [span(event) for event in recorded if not event.name.startswith(NOT_OPERATORS)]
    collectives = in_flight(on_host)
    steps = []
    for window in map(span, windows):
        annotations = [e for e in on_main_thread if e.is_user_annotation and window[0] <= span(e)[0] < window[1]]
        clock = [span(e)[1] for e in annotations if e.name == START_CLOCK]
        step = (max(clock, default=window[0]), window[1])  # a checkpoint or an evaluation is not part of the step
        host = host_parts(annotations, step)
        # Collectives that are started in other parts, such as the check for stop requests, are not the step's.
        waited_for = {*np.flatnonzero(host["forward"] | host["backward"] | host["optimizer"]).tolist()}
        communication = union((call for call in collectives if call[0] - step[0] in waited_for), step)
        exposed = communication & ~union(operators, step, SHORTEST_WAIT)
        # While nothing is computed and no collective is in flight, the time belongs to what the host does.
        parts = {name: part & ~exposed for name, part in host.items()} | {EXPOSED: exposed}
        sets = {name: parts[name] for name in CATEGORIES}
        sets |= {"step": np.ones_like(exposed), "communication": communication}
        steps.append({name: float(moments.sum()) / 1000 for name, moments in sets.items()})
    return pd.DataFrame(steps)


def host_parts(annotations: Sequence[FunctionEvent], step: Interval) -> dict[str, Moments]:
    """Return when the host is in each part of a step, from the annotations of the main thread.

    The parts are disjoint and cover the step.
    """
    forward, backward = [], []
    for start, end in (span(event) for event in annotations if event.name == MICRO_BATCH):
        ends = [span(e)[1] for e in annotations if e.name in FORWARD and start <= span(e)[0] <= end]
        boundary = max(ends, default=end)
        forward.append((start, boundary))
        backward.append((boundary, end))
    data_wait = [span(e) for e in annotations if e.name.startswith("enumerate(DataLoader)")]
    optimizer = [span(e) for e in annotations if e.name == CLIP or e.name.startswith("Optimizer.")]
    intervals = {"data wait": data_wait, "forward": forward, "backward": backward, "optimizer": optimizer}
    parts = {name: union(of_part, step) for name, of_part in intervals.items()}
    return parts | {"other": ~np.logical_or.reduce(list(parts.values()))}


def in_flight(events: Iterable[FunctionEvent]) -> list[Interval]:
    """Return when each collective over gloo is in flight: (its call, its completion).

    gloo's threads record a collective only when they begin with it, in the order of the calls.

    Args:
        events: in the order of their starts.
    """
    calls: dict[str, list[Interval]] = {}
    runs: dict[str, list[Interval]] = {}
    for event in events:
        backend, _, name = event.name.replace("gloo:", "gloo::").partition("::")
        kind = name.replace("_", "").removesuffix("base")
        if backend in ("c10d", "gloo"):
            (calls if backend == "c10d" else runs).setdefault(kind, []).append(span(event))
    intervals = []
    for kind, started in calls.items():
        waiting = iter(runs.get(kind, []))
        for call in started:
            # Whatever runs before the first call was called before the profiler began.
            run = next((run for run in waiting if run[0] >= call[0]), call)
            intervals.append((call[0], max(call[1], run[1])))
    return intervals
