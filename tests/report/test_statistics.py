"""The statistics against independent references: formulas, simulated coverage, and the verdict's wording."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from app.report.statistics import Paired, paired, verdict, wilson_interval

settings.register_profile("no deadline", deadline=None)  # a slow machine is not a counterexample
settings.load_profile("no deadline")

Z = stats.norm.ppf(0.975)
ACCURACIES = st.floats(0.5, 1.0).map(lambda x: round(x * 777) / 777)


def rows(a_only, b_only, n):
    """Two bool arrays with these counts; of the other rows, both are correct on the last one only."""
    a, b = np.zeros(n, dtype=bool), np.zeros(n, dtype=bool)
    a[:a_only] = b[a_only : a_only + b_only] = True
    if a_only + b_only < n:
        a[-1] = b[-1] = True
    return a, b


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
    a, b = np.array(pairs).T
    d, n = a - b, len(a)
    assume(np.ptp(d) > 1e-6)
    result = paired(a, b)
    error = math.sqrt(sum((x - sum(d) / n) ** 2 for x in d) / (n - 1) / n)
    half = stats.t.ppf(0.975, n - 1) * error
    assert result.p_value == pytest.approx(2 * stats.t.sf(abs(d.mean()) / error, n - 1), rel=1e-6)
    assert result.difference.estimate == pytest.approx(d.mean(), abs=1e-12)
    assert result.difference.low == pytest.approx(d.mean() - half, abs=1e-9)
    assert result.difference.high == pytest.approx(d.mean() + half, abs=1e-9)
    assert (result.n, result.mean_a, result.mean_b) == (n, pytest.approx(sum(a) / n), pytest.approx(sum(b) / n))
    assert result.std_a == pytest.approx(math.sqrt(sum((x - sum(a) / n) ** 2 for x in a) / (n - 1)), abs=1e-12)
    assert result.std_b == pytest.approx(math.sqrt(sum((x - sum(b) / n) ** 2 for x in b) / (n - 1)), abs=1e-12)


def test_false_positives_and_coverage_over_test_rows():
    """Two models of the same true accuracy, 0.9, on 777 rows that are hard or easy for both."""
    rng, runs, n = np.random.default_rng(20_241), 500, 777
    hardness = rng.beta(4.5, 0.5, size=(runs, n))
    a, b = rng.random((runs, n)) < hardness, rng.random((runs, n)) < hardness
    comparisons = [paired(x, y) for x, y in zip(a, b, strict=True)]
    tolerance = 4 * math.sqrt(0.05 * 0.95 / runs)
    assert np.mean([comparison.p_value < 0.05 for comparison in comparisons]) == pytest.approx(0.05, abs=tolerance)
    wilson = [wilson_interval(int(x.sum()), n) for x in a]
    assert np.mean([interval.low <= 0.9 <= interval.high for interval in wilson]) == pytest.approx(0.95, abs=tolerance)


def test_one_seed_gives_means_only():
    assert paired([0.9], [0.8]) == Paired(1, 0.9, None, 0.8, None, None, None)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([0.9, 0.8], [0.7, 0.6]),
        ([700 / 777, 690 / 777], [699 / 777, 689 / 777]),
        ([0.9, 0.8, 0.7], [0.9, 0.8, 0.7]),
        ([0.1 + 0.2, 0.5], [0.3, 0.5]),  # the same fractions, computed in another way with another rounding
    ],
)
def test_a_constant_difference_is_not_infinitely_significant(a, b):
    result = paired(a, b)
    assert (result.difference, result.p_value) == (None, None)


@given(st.integers(2, 400).flatmap(lambda n: st.tuples(st.integers(0, n // 2), st.integers(0, n // 2), st.just(n))))
def test_the_verdict_is_better_exactly_if_the_test_rejects_and_the_interval_agrees(counts):
    a_only, b_only, n = counts
    result = paired(*rows(a_only, b_only, n))
    line = verdict(result, "A", "B", unit="test row")
    if result.difference is not None:
        assert ("is better than" in line) == (result.p_value < 0.05)
        assert ("is better than" in line) != (result.difference.low <= 0 <= result.difference.high)
        assert line.startswith("A is better") == (result.p_value < 0.05 and a_only > b_only)
    assert "−0.00 points" not in line


def test_the_verdict_names_the_better_run_in_any_order():
    a, b = rows(60, 20, 777)
    one, other = (
        verdict(paired(a, b), "first", "second", unit="test row"),
        verdict(paired(b, a), "second", "first", unit="test row"),
    )
    assert one == other == "first is better than second by 5.15 points over 777 test rows (p < 0.001)"


@pytest.mark.parametrize(
    ("a", "b", "line"),
    [
        ([0.90, 0.91, 0.89, 0.90], [0.88, 0.89, 0.88, 0.87], "A is better than B by 2.00 points over 4 seeds (p = "),
        (
            [0.90, 0.91, 0.89],
            [0.91, 0.90, 0.89],
            "Indistinguishable over 3 seeds: the difference could be anywhere in [−2.48, +2.48] points",
        ),
        ([0.9], [0.8], "Undecided over 1 seed: A − B is +10.00 points on each of them"),
        ([0.8, 0.7], [0.9, 0.8], "Undecided over 2 seeds: A − B is −10.00 points on each"),
        ([0.9, 0.8], [0.9, 0.8], "Undecided over 2 seeds: A − B is +0.00 points on each"),
    ],
)
def test_the_verdict_over_seeds(a, b, line):
    assert verdict(paired(a, b), "A", "B", unit="seed").startswith(line)
