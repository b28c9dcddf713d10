"""Alternating rounds, and the ratios of what they have measured."""

from __future__ import annotations

from app.bench.rounds import in_rounds, ratios


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
