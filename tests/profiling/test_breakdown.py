"""Where the time of a step goes, from events that a profiler might have recorded, in microseconds."""

from __future__ import annotations

import pytest
from torch.autograd.profiler_util import FunctionEvent

from app.profiling.breakdown import CATEGORIES, EXPOSED, divide_steps
from app.strategies.base import CLIP, FORWARD, MICRO_BATCH, START_CLOCK

GLOO_THREAD = 2
# How a collective is recorded when it is called.
CALLS = {"all_reduce": "c10d::allreduce_", "all_gather": "c10d::_allgather_base_", "broadcast": "c10d::broadcast_"}


def event(name: str, start: float, end: float, thread: int = 1, is_annotation: bool = False) -> FunctionEvent:
    return FunctionEvent(0, name, thread, start, end, is_user_annotation=is_annotation)


def annotation(name: str, start: float, end: float) -> FunctionEvent:
    return event(name, start, end, is_annotation=True)


def operator(start: float, end: float) -> FunctionEvent:
    return event("aten::mm", start, end)


def collective(start: float, end: float, begins: float | None = None, kind: str = "all_reduce") -> list[FunctionEvent]:
    """A collective that is called at `start`, and that gloo's thread works on from `begins` on."""
    run = event(f"gloo:{kind}", start if begins is None else begins, end, GLOO_THREAD, is_annotation=True)
    return [event(CALLS[kind], start, start + 1), run]


STEP = [
    annotation("ProfilerStep#4", 0, 10_000),
    annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 100, 1000),
    annotation(MICRO_BATCH, 2000, 8000),
    annotation(FORWARD[0], 2100, 4000),
    annotation(CLIP, 8000, 8500),
    annotation("Optimizer.step#AdamW.step", 8600, 9600),
    annotation("Optimizer.zero_grad#AdamW.zero_grad", 9600, 9700),
]
BUSY = [operator(2100, 4000), operator(4000, 7000), operator(8000, 8500), operator(8600, 9600)]
PARTS = {"data wait": 0.9, "forward": 2.0, "backward": 4.0, EXPOSED: 0.0, "optimizer": 1.6, "other": 1.5}


def divide(*events: FunctionEvent) -> dict[str, float]:
    """The times of a single step."""
    (times,) = divide_steps(events).to_dict("records")
    return times


def pauses(length: int) -> list[FunctionEvent]:
    """Operators of the whole backward pass, with pauses of a length between them."""
    return [operator(4000 + 100 * i, 4100 + 100 * i - length) for i in range(40)]


IN_BOTH = [operator(2100, 2500), operator(3000, 4000), operator(4000, 8000), operator(8600, 9000)]
IN_BOTH += [*collective(2500, 3000, kind="all_gather"), *collective(9000, 9500, kind="broadcast")]
IN_NODES = [event("autograd::engine::evaluate_function: AddmmBackward0", 4000, 8000)]
IN_NODES += [event("torch::autograd::AccumulateGrad", 4000, 8000)]
IN_NODES += [operator(4000, 5000), *collective(5000, 6000), operator(6000, 8000)]
# Called before the profiler began.
EARLIER = event("gloo:all_reduce", -200, -100, GLOO_THREAD, is_annotation=True)
BETWEEN_STEPS = [annotation("enumerate(DataLoader)#x", 10, 50), annotation(START_CLOCK, 60, 80)]
# What is recorded besides the annotations of the step, and how its parts differ from `PARTS`.
RECORDED = {
    "waits in forward and optimizer": (IN_BOTH, {"forward": 1.5, "optimizer": 1.1, EXPOSED: 1.0}),
    "collectives of one kind, in the order of their calls, of which the last begins late": (
        [*BUSY, EARLIER, *collective(5000, 5500), *collective(7000, 7300, begins=7200)],
        {"backward": 3.7, EXPOSED: 0.3},
    ),
    "a check for stop requests, for which no step waits": ([*BUSY, *collective(50, 1500)], {}),
    "hooks that wait inside a node of autograd": (IN_NODES, {"backward": 3.0, EXPOSED: 1.0}),
    "pauses too short to be waits": ([*pauses(40), *collective(4000, 7960)], {}),
    "pauses": ([*pauses(60), *collective(4000, 7940)], {"backward": 4.0 - 39 * 0.06, EXPOSED: 39 * 0.06}),
    "operators of another thread": (
        [*collective(4000, 8000), event("aten::add_", 4000, 8000, GLOO_THREAD)],
        {"backward": 0.0, EXPOSED: 4.0},
    ),
    "an evaluation or a checkpoint before the step": ([*BUSY, *BETWEEN_STEPS], {"other": 1.42}),
}


@pytest.mark.parametrize(("recorded", "changes"), RECORDED.values(), ids=RECORDED)
def test_only_the_time_in_which_a_step_waits_for_a_collective_is_exposed(recorded, changes):
    times = divide(*STEP, *recorded)
    assert {name: times[name] for name in CATEGORIES} == pytest.approx(PARTS | changes)


def test_each_micro_batch_has_a_forward_and_a_backward_pass():
    step = [event for event in STEP if event.name not in (MICRO_BATCH, FORWARD[0])]
    for start in (2000, 5000):
        step += [annotation(MICRO_BATCH, start, start + 3000), annotation(FORWARD[1], start + 100, start + 1000)]
    assert divide(*step) == pytest.approx(PARTS | {"step": 10, "communication": 0})


def test_each_step_is_divided_on_its_own_and_has_its_communication_exposed_or_hidden():
    second = [
        event(e.name, e.time_range.start + 10_000, e.time_range.end + 10_000, e.thread, e.is_user_annotation)
        for e in [*STEP, *BUSY]
    ]
    steps = divide_steps([*second, *STEP, *BUSY, *collective(5000, 7600)])
    expected = {EXPOSED: [0.6, 0], "backward": [3.4, 4.0], "step": [10, 10], "communication": [2.6, 0]}
    assert {name: steps[name].round(9).to_list() for name in expected} == expected
