"""Divide the time of profiled training steps among data wait, computation and communication.

The input is what torch.profiler has recorded on one rank. Every moment of a step belongs to exactly one category:

- *data wait*: the loader's `next()`;
- *forward*: from the start of a micro-batch to the end of the model's forward pass, which includes the loss;
- *backward*: from there to the end of the micro-batch;
- *optimizer*: clipping, the optimizer's step, and clearing the gradients;
- *other*: the rest, such as logging, the schedule, seeding, and Python between these parts;
- *exposed communication*: the moments of forward, backward and optimizer in which a collective is in flight and the
  rank computes nothing. A collective is in flight from its call until it has completed on this rank, so the wait for
  slower ranks is part of it. The communication that is not exposed is *hidden* behind computation.

On a CPU, the rank computes while its main thread executes an operator. On a GPU, it computes while a kernel runs, which
belongs to the part of the step that has launched it, and NCCL's kernels are the collectives. Moments in which the GPU
does nothing belong to what the host does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..record.step_log import START_CLOCK
from ..strategies.base import CLIP, FORWARD, MICRO_BATCH

Intervals = list[tuple[int, int]]  # sorted and disjoint; in nanoseconds, as all times here

EXPOSED = "exposed communication"
CATEGORIES = ("data wait", "forward", "backward", EXPOSED, "optimizer", "other")
COMMUNICATING = ("forward", "backward", "optimizer")  # collectives that are started in other parts are not the step's
# Between two operators, Python and the profiler itself take time. Shorter pauses count as computation, not as waiting.
SHORTEST_WAIT = 50_000
NOT_OPERATORS = ("c10d", "autograd", "torch")  # namespaces of events that contain operators, or waits


@dataclass(frozen=True)
class Event:
    """Something that the profiler has recorded.

    Attributes:
        thread: an id of the thread on the host; it means nothing for a kernel.
        is_annotation: whether it is a range of `record_function` and not an operator.
        launched: the time at which the host launched it, for a kernel or a copy on a GPU; otherwise None.
    """

    name: str
    start: int
    end: int
    thread: int = 0
    is_annotation: bool = False
    launched: int | None = None


@dataclass(frozen=True)
class StepTimes:
    """The time of one training step on one rank, in milliseconds.

    Attributes:
        parts: the time of each of `CATEGORIES`.
        communication: how long at least one collective of the step was in flight.
    """

    parts: dict[str, float]
    communication: float

    @property
    def total(self) -> float:
        """The duration of the step."""
        return sum(self.parts.values())

    @property
    def hidden(self) -> float:
        """The communication during which the rank computes."""
        return self.communication - self.parts[EXPOSED]


def mean(steps: Sequence[StepTimes]) -> StepTimes:
    """Return the mean of several steps."""
    parts = {name: sum(step.parts[name] for step in steps) / len(steps) for name in CATEGORIES}
    return StepTimes(parts, sum(step.communication for step in steps) / len(steps))


def divide_steps(events: Sequence[Event]) -> list[StepTimes]:
    """Return the times of all steps between two calls of the profiler's `step()`, in order."""
    windows = sorted((e for e in events if e.is_annotation and e.name.startswith("ProfilerStep")), key=_start)
    main_thread = windows[0].thread
    on_main_thread = [event for event in events if event.thread == main_thread and event.launched is None]
    annotations = [event for event in on_main_thread if event.is_annotation]
    operators = union(((e.start, e.end) for e in on_main_thread if _is_operator(e)), SHORTEST_WAIT)
    kernels = [event for event in events if event.launched is not None]
    collectives = in_flight(events)
    steps = []
    for window in windows:
        clock = [e.end for e in annotations if e.name == START_CLOCK and window.start <= e.end <= window.end]
        start = max(clock, default=window.start)  # a checkpoint or an evaluation is not part of the step
        host = host_parts([e for e in annotations if window.start <= e.start < window.end], start, window.end)
        if kernels:
            during = [kernel for kernel in kernels if kernel.end > start and kernel.start < window.end]
            computing, communication = _kernels_by_part(during, host, start, end=window.end)
        else:
            computing = {name: intersect(operators, intervals) for name, intervals in host.items()}
            communicating = union(interval for name in COMMUNICATING for interval in host[name])
            of_step = (one for one in collectives if start <= one[0] < window.end and contains(communicating, one[0]))
            communication = intersect(union(of_step), [(start, window.end)])
        steps.append(_divide(host, computing, communication))
    return steps


def _divide(host: dict[str, Intervals], computing: dict[str, Intervals], communication: Intervals) -> StepTimes:
    """Divide a step.

    Args:
        host: what the host does, which covers the step.
        computing: disjoint intervals in which the device computes for each part.
        communication: when at least one collective is in flight.
    """
    all_computing = union(interval for intervals in computing.values() for interval in intervals)
    exposed = subtract(communication, all_computing)
    busy = union([*all_computing, *exposed])
    parts = {name: length(computing[name]) + length(subtract(host[name], busy)) for name in host}
    parts[EXPOSED] = length(exposed)
    return StepTimes({name: parts[name] / 1e6 for name in CATEGORIES}, length(communication) / 1e6)


def host_parts(annotations: Sequence[Event], start: int, end: int) -> dict[str, Intervals]:
    """Return when the host is in each part of a step. The parts are disjoint and cover the step.

    Args:
        annotations: the ranges of the main thread.
    """
    window = [(start, end)]

    def ranges(is_part: Iterable[tuple[int, int]]) -> Intervals:
        return intersect(union(is_part), window)

    forward, backward = [], []
    for batch in annotations:
        if batch.name == MICRO_BATCH:
            ends = [e.end for e in annotations if e.name in FORWARD and batch.start <= e.start <= batch.end]
            boundary = max(ends, default=batch.end)
            forward.append((batch.start, boundary))
            backward.append((boundary, batch.end))
    parts = {
        "data wait": ranges((e.start, e.end) for e in annotations if e.name.startswith("enumerate(DataLoader)")),
        "forward": ranges(forward),
        "backward": ranges(backward),
        "optimizer": ranges((e.start, e.end) for e in annotations if e.name == CLIP or e.name.startswith("Optimizer.")),
    }
    parts["other"] = subtract(window, union(interval for intervals in parts.values() for interval in intervals))
    return parts


def in_flight(events: Iterable[Event]) -> Intervals:
    """Return when each collective over gloo is in flight: (its call, its completion), in the order of the calls.

    gloo's threads record a collective only when they begin with it, in the order of the calls.
    """
    calls: dict[str, list[Event]] = {}
    runs: dict[str, list[Event]] = {}
    for event in sorted(events, key=_start):
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
    return sorted(intervals)


def _kernels_by_part(
    kernels: Sequence[Event], host: dict[str, Intervals], start: int, *, end: int
) -> tuple[dict[str, Intervals], Intervals]:
    """Return when the GPU computes for each part of a step, and when it communicates.

    Where kernels of two parts overlap, the time belongs to the part that comes first in the step.
    """
    window = [(start, end)]
    communication = intersect(union((k.start, k.end) for k in kernels if k.name.startswith("nccl")), window)
    compute = [kernel for kernel in kernels if not kernel.name.startswith("nccl")]
    computing: dict[str, Intervals] = {}
    covered: Intervals = []
    for name, intervals in host.items():
        of_part = [k for k in compute if k.launched is not None and contains(intervals, k.launched)]
        computing[name] = subtract(intersect(union((k.start, k.end) for k in of_part), window), covered)
        covered = union([*covered, *computing[name]])
    return computing, communication


def _is_operator(event: Event) -> bool:
    namespace, separator, _ = event.name.partition("::")
    return not event.is_annotation and bool(separator) and namespace not in NOT_OPERATORS


def _start(event: Event) -> int:
    return event.start


# ---- intervals ------------------------------------------------------------------------------------------------------


def union(intervals: Iterable[tuple[int, int]], gap: int = 0) -> Intervals:
    """Return the union of intervals. Two that are at most `gap` apart become one."""
    merged: Intervals = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Return what is in both."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Return what is in `a` and not in `b`."""
    if not a:
        return []
    edges = [a[0][0], *(edge for interval in b for edge in interval), max(a[-1][1], b[-1][1] if b else 0)]
    return intersect(a, [(end, start) for end, start in zip(edges[::2], edges[1::2], strict=True) if end < start])


def contains(intervals: Intervals, time: int) -> bool:
    """Return whether a time is in one of the intervals."""
    return bool(intersect(intervals, [(time, time + 1)]))


def length(intervals: Intervals) -> int:
    """Return the sum of the lengths."""
    return sum(end - start for start, end in intervals)
