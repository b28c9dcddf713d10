"""The statistics against published values and scipy, and the verdict that follows from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from app.report.statistics import paired, verdict, wilson_interval

# Newcombe 1998, "Two-sided confidence intervals for the single proportion", table 1, method 3.
WILSON = [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)]


@pytest.mark.parametrize(("correct", "n", "low", "high"), WILSON)
def test_the_interval_of_an_accuracy_is_wilsons(correct, n, low, high):
    interval = wilson_interval(correct, n)
    assert [interval[name] for name in ("estimate", "low", "high")] == pytest.approx([correct / n, low, high], abs=5e-5)


def test_values_are_paired_as_in_the_t_test_of_their_differences():
    a, b = np.random.default_rng(0).uniform(0.8, 0.9, (2, 12))
    found, expected = paired(a, b), stats.ttest_1samp(a - b, 0)
    low, high = expected.confidence_interval(0.95)
    assert (found.n, found.p_value) == (12, pytest.approx(expected.pvalue))
    interval = tuple(found.difference[name] for name in ("low", "estimate", "high"))
    assert interval == pytest.approx((low, np.mean(a - b), high))
    of_each = (found.mean_a, found.std_a, found.mean_b, found.std_b)
    assert of_each == pytest.approx((a.mean(), stats.tstd(a), b.mean(), stats.tstd(b)))


@given(st.integers(2, 400).flatmap(lambda n: st.tuples(st.integers(0, n // 2), st.integers(0, n // 2), st.just(n))))
def test_the_verdict_names_the_better_one_exactly_if_the_test_rejects_and_the_interval_agrees(counts):
    a_only, b_only, n = counts
    a, b = np.arange(n) < a_only, np.arange(n) >= n - b_only  # whether each row is classified correctly
    result = paired(a, b)
    line = verdict(result, "A", "B", unit="test row")
    if result.difference is not None:
        rejects = result.p_value < 0.05
        assert rejects != (result.difference["low"] <= 0 <= result.difference["high"])
        assert ("is better than" in line) == rejects
        assert line.startswith("A is better") == (rejects and a_only > b_only)
        assert not rejects or line == verdict(paired(b, a), "B", "A", unit="test row")
    assert "−0.00 points" not in line


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("a", "b", "line"),
    [
        ([0.90, 0.91, 0.89, 0.90], [0.88, 0.89, 0.88, 0.87], "A is better than B by 2.00 points over 4 seeds (p = "),
        (
            [0.90, 0.91, 0.89],
            [0.91, 0.90, 0.89],
            "Indistinguishable over 3 seeds: the difference could be anywhere in [−2.48, +2.48]",
        ),
        ([0.8], [0.9], "Undecided over 1 seed: A − B is −10.00 points on each of them"),
        ([700 / 777, 690 / 777], [699 / 777, 689 / 777], "Undecided over 2 seeds"),
        ([0.9, 0.8, 0.7], [0.9, 0.8, 0.7], "Undecided over 3 seeds"),
        ([0.1 + 0.2, 0.5], [0.3, 0.5], "Undecided over 2 seeds"),  # the same fractions with another rounding
    ],
)
def test_the_verdict_states_size_and_certainty_and_a_constant_difference_is_not_infinitely_significant(a, b, line):
    result = paired(a, b)
    assert verdict(result, "A", "B", unit="seed").startswith(line)
    assert (result.difference is None) == (result.p_value is None) == line.startswith("Undecided")
