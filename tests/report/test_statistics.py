"""The statistics against their formulas, and the verdict that follows from them."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from app.report.statistics import paired, verdict, wilson_interval

Z = stats.norm.ppf(0.975)
ACCURACIES = st.floats(0.5, 1.0).map(lambda x: round(x * 777) / 777)


@given(st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_limits_solve_the_score_equation(counts):
    correct, n = counts
    interval = wilson_interval(correct, n)
    assert interval.estimate == correct / n
    assert 0 <= interval.low <= interval.estimate <= interval.high <= 1
    for limit in (interval.low, interval.high):
        assert abs(correct / n - limit) == pytest.approx(Z * math.sqrt(limit * (1 - limit) / n), abs=1e-9)
    assert interval.low < interval.high


@given(st.lists(st.tuples(ACCURACIES, ACCURACIES), min_size=2, max_size=12))
def test_paired_agrees_with_the_formulas_of_the_paired_t_test(pairs):
    a, b = (list(values) for values in zip(*pairs, strict=True))
    d, n = [x - y for x, y in pairs], len(pairs)
    assume(np.ptp(d) > 1e-6)
    mean, error = statistics.fmean(d), statistics.stdev(d) / math.sqrt(n)
    half = stats.t.ppf(0.975, n - 1) * error
    found = paired(a, b)
    assert found.n == n
    assert found.p_value == pytest.approx(2 * stats.t.sf(abs(mean) / error, n - 1), rel=1e-6)
    interval = (found.difference.low, found.difference.estimate, found.difference.high)
    assert interval == pytest.approx((mean - half, mean, mean + half), abs=1e-9)
    assert (found.mean_a, found.mean_b) == pytest.approx((statistics.fmean(a), statistics.fmean(b)))
    assert (found.std_a, found.std_b) == pytest.approx((statistics.stdev(a), statistics.stdev(b)), abs=1e-12)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([700 / 777, 690 / 777], [699 / 777, 689 / 777]),
        ([0.9, 0.8, 0.7], [0.9, 0.8, 0.7]),
        ([0.9], [0.8]),
        ([0.1 + 0.2, 0.5], [0.3, 0.5]),  # the same fractions, computed in another way with another rounding
    ],
)
def test_a_constant_difference_is_not_infinitely_significant(a, b):
    result = paired(a, b)
    assert (result.difference, result.p_value) == (None, None)
    assert verdict(result, "A", "B", unit="seed").startswith("Undecided over ")


@given(st.integers(2, 400).flatmap(lambda n: st.tuples(st.integers(0, n // 2), st.integers(0, n // 2), st.just(n))))
def test_the_verdict_names_the_better_one_exactly_if_the_test_rejects_and_the_interval_agrees(counts):
    a_only, b_only, n = counts
    a, b = np.arange(n) < a_only, np.arange(n) >= n - b_only  # whether each row is classified correctly
    result = paired(a, b)
    line = verdict(result, "A", "B", unit="test row")
    if result.difference is not None:
        rejects = result.p_value < 0.05
        assert rejects != (result.difference.low <= 0 <= result.difference.high)
        assert ("is better than" in line) == rejects
        assert line.startswith("A is better") == (rejects and a_only > b_only)
        assert not rejects or line == verdict(paired(b, a), "B", "A", unit="test row")
    assert "−0.00 points" not in line


@pytest.mark.parametrize(
    ("a", "b", "line"),
    [
        ([0.90, 0.91, 0.89, 0.90], [0.88, 0.89, 0.88, 0.87], "A is better than B by 2.00 points over 4 seeds (p = "),
        (
            [0.90, 0.91, 0.89],
            [0.91, 0.90, 0.89],
            "Indistinguishable over 3 seeds: the difference could be anywhere in [−2.48, +2.48] points",
        ),
        ([0.8], [0.9], "Undecided over 1 seed: A − B is −10.00 points on each of them"),
    ],
)
def test_the_verdict_states_size_and_certainty(a, b, line):
    assert verdict(paired(a, b), "A", "B", unit="seed").startswith(line)
