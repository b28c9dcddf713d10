"""How often calls are timed. What they take is a benchmark's result, not a test's."""

from __future__ import annotations

from app.bench.communication import timing
from app.bench.communication.timing import FEWEST_ROUNDS, MOST_CALLS, ROUNDS, time_calls, time_repeated


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

    monkeypatch.setattr(timing, "time_repeated", pretend)
    calls = {name: (lambda name=name: name) for name in takes}
    taken = time_calls(calls, seconds_per_call=1.0, world=world, disable_tqdm=True)
    assert taken == {"short": [1e-6] * ROUNDS, "middle": [0.05] * ROUNDS, "long": [100.0] * FEWEST_ROUNDS}
    assert timed[:3] == [(name, 1) for name in takes], "one call of each to estimate its time"
    repetitions = {"short": MOST_CALLS, "middle": 2, "long": 1}
    rounds = [[*takes] if number < FEWEST_ROUNDS else ["short", "middle"] for number in range(ROUNDS)]
    expected = [name for number, names in enumerate(rounds) for name in (reversed(names) if number % 2 else names)]
    assert timed[3:] == [(name, repetitions[name]) for name in expected], "the rounds alternate"
