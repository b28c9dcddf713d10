"""Where the time of a step goes, from events that a profiler might have recorded, in microseconds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.profiler_util import FunctionEvent

from app.profiling.breakdown import CATEGORIES, EXPOSED, divide_steps, union
from app.strategies.base import CLIP, FORWARD, MICRO_BATCH, START_CLOCK

GLOO_THREAD = 2


def event(name: str, start: float, end: float, thread: int = 1, is_annotation: bool = False) -> FunctionEvent:
    return FunctionEvent(0, name, thread, start, end, is_user_annotation=is_annotation)


def annotation(name: str, start: float, end: float) -> FunctionEvent:
    return event(name, start, end, is_annotation=True)


def operator(start: float, end: float, name: str = "aten::mm") -> FunctionEvent:
    return event(name, start, end)


def collective(start: float, end: float, begins: float | None = None, kind: str = "all_reduce") -> list[FunctionEvent]:
    """A collective that is called at `start`, and that gloo's thread works on from `begins` on."""
    call = {"all_reduce": "c10d::allreduce_", "all_gather": "c10d::_allgather_base_", "broadcast": "c10d::broadcast_"}
    run = event(f"gloo:{kind}", start if begins is None else begins, end, GLOO_THREAD, is_annotation=True)
    return [event(call[kind], start, start + 1), run]


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


def parts(times: dict[str, float]) -> dict[str, float]:
    return {name: times[name] for name in CATEGORIES}


def test_without_communication_the_ranges_are_the_parts():
    times = divide(*STEP, *BUSY)
    assert parts(times) == pytest.approx(PARTS)
    assert (times["step"], times["communication"]) == (pytest.approx(10), 0)


def test_the_wait_at_the_end_of_backward_is_exposed_and_the_rest_is_hidden():
    times = divide(*STEP, *BUSY, *collective(5000, 7600))
    assert parts(times) == pytest.approx(PARTS | {"backward": 3.4, EXPOSED: 0.6})
    assert times["communication"] == pytest.approx(2.6)


def test_waits_in_the_forward_pass_and_in_the_optimizer_are_exposed():
    busy = [operator(2100, 2500), operator(3000, 4000), operator(4000, 8000), operator(8600, 9000)]
    waits = [*collective(2500, 3000, kind="all_gather"), *collective(9000, 9500, kind="broadcast")]
    times = divide(*STEP, *busy, *waits)
    assert parts(times) == pytest.approx(PARTS | {"forward": 1.5, "optimizer": 1.1, EXPOSED: 1.0})


def test_a_collective_counts_from_its_call_although_the_thread_of_gloo_begins_later():
    times = divide(*STEP, *BUSY, *collective(7000, 7900, begins=7400))
    assert times[EXPOSED] == pytest.approx(0.9)


def test_collectives_of_the_same_kind_are_matched_in_the_order_of_their_calls():
    before = event("gloo:all_reduce", -200, -100, GLOO_THREAD, is_annotation=True)  # called before the profiler began
    times = divide(*STEP, *BUSY, before, *collective(5000, 5500), *collective(7000, 7300, begins=7200))
    assert times["communication"] == pytest.approx(0.8)
    assert times[EXPOSED] == pytest.approx(0.3)


def test_a_collective_that_the_step_does_not_wait_for_is_not_counted():
    check_for_stop_requests = collective(50, 1500)  # nothing is computed until 2100
    assert parts(divide(*STEP, *BUSY, *check_for_stop_requests)) == pytest.approx(PARTS)


def test_hooks_that_wait_inside_a_node_of_autograd_are_exposed():
    nodes = [operator(4000, 8000, "autograd::engine::evaluate_function: AddmmBackward0")]
    nodes += [operator(4000, 8000, "torch::autograd::AccumulateGrad")]
    times = divide(*STEP, *nodes, operator(4000, 5000), *collective(5000, 6000), operator(6000, 8000))
    assert times[EXPOSED] == pytest.approx(1.0)


def test_short_pauses_between_operators_are_not_waits():
    busy = [operator(4000 + 100 * i, 4060 + 100 * i) for i in range(40)]  # pauses of 40 microseconds
    assert divide(*STEP, *busy, *collective(4000, 7960))[EXPOSED] == 0
    busy = [operator(4000 + 100 * i, 4040 + 100 * i) for i in range(40)]  # pauses of 60 microseconds
    assert divide(*STEP, *busy, *collective(4000, 7940))[EXPOSED] == pytest.approx(39 * 0.06)


def test_operators_of_other_threads_do_not_hide_communication():
    times = divide(*STEP, *collective(4000, 8000), event("aten::add_", 4000, 8000, GLOO_THREAD))
    assert times[EXPOSED] == pytest.approx(4.0)


def test_a_checkpoint_or_an_evaluation_before_a_step_is_not_part_of_it():
    evaluation = [annotation("enumerate(DataLoader)#x", 10, 50), annotation(START_CLOCK, 60, 80)]
    times = divide(*STEP, *BUSY, *evaluation)
    assert parts(times) == pytest.approx(PARTS | {"other": 1.42})


def test_each_micro_batch_has_a_forward_and_a_backward_pass():
    step = [event for event in STEP if event.name not in (MICRO_BATCH, FORWARD[0])]
    for start in (2000, 5000):
        step += [annotation(MICRO_BATCH, start, start + 3000), annotation(FORWARD[1], start + 100, start + 1000)]
    assert parts(divide(*step)) == pytest.approx(PARTS | {"forward": 2.0, "backward": 4.0})


def test_each_step_is_divided_on_its_own():
    second = [
        event(e.name, e.time_range.start + 10_000, e.time_range.end + 10_000, e.thread, e.is_user_annotation)
        for e in [*STEP, *BUSY]
    ]
    steps = divide_steps([*second, *STEP, *BUSY, *collective(5000, 7600)])
    assert steps[EXPOSED].tolist() == [pytest.approx(0.6), 0]
    assert steps["backward"].tolist() == [pytest.approx(3.4), pytest.approx(4.0)]


@st.composite
def recorded(draw):
    moments = st.integers(0, 10_000)
    spans = st.lists(st.tuples(moments, moments).map(sorted), max_size=12)
    kinds = st.sampled_from(["all_reduce", "all_gather", "broadcast"])
    events = [operator(start, end) for start, end in draw(spans)]
    for start, end in draw(spans):
        events += collective(start, end + 1, begins=draw(st.integers(start, end)), kind=draw(kinds))
    return events


@given(recorded())
def test_the_parts_of_a_step_add_up_to_its_duration(events):
    times = divide(*STEP, *events)
    assert tuple(times) == (*CATEGORIES, "step", "communication")
    assert sum(parts(times).values()) == pytest.approx(times["step"]) == pytest.approx(10)
    assert min(parts(times).values()) >= 0
    assert times["communication"] >= times[EXPOSED] - 1e-9


INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=6).map(
    lambda pairs: [(start, start + duration) for start, duration in pairs]
)


@given(INTERVALS, st.integers(0, 4))
def test_a_union_has_the_moments_of_all_intervals_and_of_short_pauses_between_them(intervals, gap):
    covered = {point for start, end in intervals for point in range(start, end)}
    for pause in range(1, gap + 1):
        for point in range(40 - pause):
            if {point, point + pause + 1} <= covered and not covered & set(range(point + 1, point + pause + 1)):
                covered |= set(range(point + 1, point + pause + 1))
    assert set(union(intervals, (0, 40), gap).nonzero()[0]) == covered
    inside = {point - 5 for point in covered if 5 <= point < 20}
    assert set(union(intervals, (5, 20), gap).nonzero()[0]) == inside
