"""Alternating rounds, the ratios of their results, and how often calls are timed."""

from __future__ import annotations

from app.bench import rounds
from app.bench.rounds import FEWEST_ROUNDS, MOST_CALLS, ROUNDS, in_rounds, ratios, time_calls, time_repeated


def test_rounds_alternate_and_the_first_one_may_not_count():
    made: list[tuple[str, int]] = []

    def measure(name: str, number: int) -> str:
        made.append((name, number))
        return f"{name}{number}"

    measurements = {name: (lambda number, name=name: measure(name, number)) for name in "abc"}
    assert in_rounds(measurements, 2) == {"a": ["a0", "a1"], "b": ["b0", "b1"], "c": ["c0", "c1"]}
    assert made == [("a", 0), ("b", 0), ("c", 0), ("c", 1), ("b", 1), ("a", 1)], "the second one has the opposite order"
    assert in_rounds(measurements, 2, warm_up=True) == {name: [f"{name}1", f"{name}2"] for name in "abc"}


def test_ratios_are_between_times_of_the_same_round():
    assert ratios([3.0, 4.0, 40.0], [1.0, 2.0, 4.0]) == (3.0, 2.0, 10.0)
    assert ratios([3.0, 4.0], [1.0, 2.0, 4.0]) == (2.5, 2.0, 3.0), "what takes long may have fewer rounds"


def test_a_repeated_call_is_made_as_often_as_asked(world):
    made = []
    assert time_repeated(lambda: made.append(1), 5, world) > 0
    assert len(made) == 5


def test_short_calls_are_repeated_and_long_ones_are_timed_in_fewer_rounds(world, monkeypatch):
    takes = {"short": 1e-6, "middle": 0.05, "long": 100.0}
    timed: list[tuple[str, int]] = []

    def pretend(call, repetitions, world):
        timed.append((call(), repetitions))
        return takes[call()]

    monkeypatch.setattr(rounds, "time_repeated", pretend)
    calls = {name: (lambda name=name: name) for name in takes}
    taken = time_calls(calls, seconds_per_call=1.0, world=world, disable_tqdm=True)
    assert taken == {"short": [1e-6] * ROUNDS, "middle": [0.05] * ROUNDS, "long": [100.0] * FEWEST_ROUNDS}
    assert timed[:3] == [(name, 1) for name in takes], "one call of each to estimate its time"
    repetitions = {"short": MOST_CALLS, "middle": 2, "long": 1}
    in_turn = [[*takes] if number < FEWEST_ROUNDS else ["short", "middle"] for number in range(ROUNDS)]
    expected = [name for number, names in enumerate(in_turn) for name in (reversed(names) if number % 2 else names)]
    assert timed[3:] == [(name, repetitions[name]) for name in expected], "the rounds alternate"
