"""The statistics against independent references: published values, brute force, identities, exact coverage."""

import math
import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import optimize, stats
from sklearn.calibration import calibration_curve

from app.report.statistics import (
    PairedSeeds,
    accuracy_by_length,
    calibration_bins,
    expected_calibration_error,
    mcnemar_exact,
    paired_difference_interval,
    paired_rows,
    paired_seeds,
    verdict,
    wilson_interval,
)

settings.register_profile("no deadline", deadline=None)  # a slow machine is not a counterexample
settings.load_profile("no deadline")

Z = stats.norm.ppf(0.975)


@st.composite
def discordant_counts(draw, largest=2000):
    """Draw (a_only, b_only, n), including the extreme cases."""
    n = draw(st.integers(1, largest))
    a_only = draw(st.integers(0, n))
    return a_only, draw(st.integers(0, n - a_only)), n


def rows(a_only, b_only, n):
    """Two bool arrays with these counts; of the other rows, both are correct on the last one only."""
    a, b = np.zeros(n, dtype=bool), np.zeros(n, dtype=bool)
    a[:a_only] = b[a_only : a_only + b_only] = True
    if a_only + b_only < n:
        a[-1] = b[-1] = True
    return a, b


# Wilson


@given(st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_limits_solve_the_score_equation(counts):
    correct, n = counts
    interval = wilson_interval(correct, n)
    assert interval.estimate == correct / n
    assert 0 <= interval.low <= interval.estimate <= interval.high <= 1
    for limit in (interval.low, interval.high):
        assert abs(correct / n - limit) == pytest.approx(Z * math.sqrt(limit * (1 - limit) / n), abs=1e-9)
    assert interval.low < interval.high


# McNemar


@pytest.mark.parametrize("discordant", [0, 1, 2, 5, 9, 10, 33, 100])
def test_mcnemar_sums_the_outcomes_that_are_at_most_as_likely(discordant):
    ways = [math.comb(discordant, k) for k in range(discordant + 1)]
    for a_only, observed in enumerate(ways):
        p = sum(way for way in ways if way <= observed) / 2**discordant
        assert mcnemar_exact(a_only, discordant - a_only) == pytest.approx(p, rel=1e-9)


def test_the_size_of_mcnemars_test_is_at_most_its_level():
    sizes = []
    for discordant in range(1, 151, 3):
        rejected = [mcnemar_exact(k, discordant - k) < 0.05 for k in range(discordant + 1)]
        sizes.append(stats.binom.pmf(np.arange(discordant + 1), discordant, 0.5)[rejected].sum())
    assert max(sizes) <= 0.05
    assert sizes[-1] > 0.02, "a test that never rejects would pass, too"


@pytest.mark.slow
def test_false_positive_rate_and_coverage_of_simulated_runs():
    """Two models of the same true accuracy, 0.9, on 777 rows that are hard or easy for both: 2,000 comparisons."""
    rng, runs, n = np.random.default_rng(20_241), 2_000, 777
    hardness = rng.beta(4.5, 0.5, size=(runs, n))
    a, b = rng.random((runs, n)) < hardness, rng.random((runs, n)) < hardness
    comparisons = [paired_rows(x, y) for x, y in zip(a, b, strict=True)]
    deviation = math.sqrt(0.05 * 0.95 / runs)
    false_positives = np.mean([comparison.p_value < 0.05 for comparison in comparisons])
    assert 0.01 < false_positives <= 0.05 + 3 * deviation
    covered = np.mean([comparison.difference.low <= 0 <= comparison.difference.high for comparison in comparisons])
    assert covered == pytest.approx(0.95, abs=4 * deviation)
    wilson = np.mean([comparison.accuracy_a.low <= 0.9 <= comparison.accuracy_a.high for comparison in comparisons])
    assert wilson == pytest.approx(0.95, abs=4 * deviation)


# Tango


def test_tango_gives_the_published_interval():
    """Fagerland, Lydersen and Laake (2014), Statistics in Medicine 33:2850: airway data, 1 and 7 discordant of 21."""
    interval = paired_difference_interval(1, 7, 21)
    assert (round(interval.low, 3), round(interval.high, 3)) == (-0.517, -0.026)


def score(d, a_only, b_only, n):
    """Tango's statistic at `d`, its nuisance parameter result by maximizing the multinomial likelihood numerically."""

    def minus_log_likelihood(only_b):
        return -stats.multinomial.logpmf(
            [a_only, b_only, n - a_only - b_only], n, [only_b + d, only_b, 1 - 2 * only_b - d]
        )

    only_b = optimize.minimize_scalar(
        minus_log_likelihood, bounds=(max(0.0, -d), (1 - d) / 2), method="bounded", options={"xatol": 1e-12}
    ).x
    return (a_only - b_only - n * d) / math.sqrt(n * (2 * only_b + d * (1 - d)))


@pytest.mark.parametrize(
    "counts", [(1, 7, 21), (3, 2, 10), (40, 30, 777), (5, 12, 777), (1, 1, 50), (9, 3, 12), (200, 350, 777)]
)
def test_tango_contains_exactly_the_differences_that_the_score_test_does_not_reject(counts):
    interval = paired_difference_interval(*counts)
    assert score(interval.low, *counts) == pytest.approx(Z, abs=1e-4)
    assert score(interval.high, *counts) == pytest.approx(-Z, abs=1e-4)
    for d in np.linspace(-0.99, 0.99, 45):
        not_rejected = abs(score(d, *counts)) <= Z
        assert not_rejected == (interval.low <= d <= interval.high), d


@given(discordant_counts())
def test_tango_is_antisymmetric_and_contains_the_difference(counts):
    a_only, b_only, n = counts
    interval = paired_difference_interval(a_only, b_only, n)
    swapped = paired_difference_interval(b_only, a_only, n)
    assert (swapped.estimate, swapped.low, swapped.high) == (-interval.estimate, -interval.high, -interval.low)
    assert interval.estimate == (a_only - b_only) / n
    assert -1 <= interval.low <= interval.estimate <= interval.high <= 1
    assert interval.high - interval.low >= Z**2 / (n + Z**2), "never a single point"


@given(discordant_counts(300), st.integers(2, 50))
def test_tango_gets_narrower_with_more_rows(counts, times):
    few, many = (paired_difference_interval(*(factor * count for count in counts)) for factor in (1, times))
    assert many.high - many.low < few.high - few.low
    assert few.low - 1e-9 <= many.low <= many.high <= few.high + 1e-9


@given(st.integers(1, 10**6))
def test_tango_without_disagreements_is_wilson_of_zero_on_both_sides(n):
    interval, wilson = paired_difference_interval(0, 0, n), wilson_interval(0, n)
    assert interval.high == pytest.approx(wilson.high, rel=1e-6)
    assert interval.low == -interval.high


@given(discordant_counts(500))
def test_tango_excludes_zero_if_mcnemar_rejects(counts):
    """Therefore the verdict has three cases, not four."""
    a_only, b_only, n = counts
    assume(mcnemar_exact(a_only, b_only) < 0.05)
    interval = paired_difference_interval(a_only, b_only, n)
    assert interval.low > 0 or interval.high < 0


@pytest.mark.parametrize(("n", "largest"), [(30, 30), (777, 45)])
def test_the_exact_coverage_of_tango_is_close_to_its_confidence(n, largest):
    """Without simulation error: sum the probabilities of all tables whose interval contains the true difference."""
    tables = np.array([(a, b, n - a - b) for a in range(largest + 1) for b in range(largest + 1) if a + b <= n])
    intervals = [paired_difference_interval(int(a), int(b), n) for a, b, _ in tables]
    low, high = np.array([[interval.low, interval.high] for interval in intervals]).T
    coverage = []
    shares = (0.05, 0.1, 0.2, 0.35) if n == 30 else (0.002, 0.005, 0.01, 0.015, 0.02)
    for only_a in shares:
        for only_b in shares:
            weight = stats.multinomial.pmf(tables, n, [only_a, only_b, 1 - only_a - only_b])
            assert weight.sum() > 1 - 1e-8, "omitted tables would count as not covered"
            coverage.append(weight[(low <= only_a - only_b) & (only_a - only_b <= high)].sum())
    assert min(coverage) >= 0.935
    assert 0.945 <= np.mean(coverage) <= 0.975, "neither too narrow nor too wide"


# Rows


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=200))
def test_row_counts_agree_with_a_loop(pairs):
    result = paired_rows(*np.array(pairs).T)
    assert result.n == len(pairs)
    assert result.a_only == sum(a and not b for a, b in pairs)
    assert result.b_only == sum(b and not a for a, b in pairs)
    assert result.accuracy_a == wilson_interval(sum(a for a, _ in pairs), len(pairs))
    assert result.accuracy_b == wilson_interval(sum(b for _, b in pairs), len(pairs))
    assert result.difference == paired_difference_interval(result.a_only, result.b_only, result.n)
    assert result.p_value == mcnemar_exact(result.a_only, result.b_only)
    assert result.difference.estimate == pytest.approx(result.accuracy_a.estimate - result.accuracy_b.estimate)


# Seeds

ACCURACIES = st.floats(0.5, 1.0).map(lambda x: round(x * 777) / 777)


@given(st.lists(st.tuples(ACCURACIES, ACCURACIES), min_size=2, max_size=12))
def test_paired_seeds_agrees_with_the_formulas_of_the_paired_t_test(pairs):
    a, b = np.array(pairs).T
    d, n = a - b, len(a)
    assume(np.ptp(d) > 1e-6)
    result = paired_seeds(a, b)
    error = math.sqrt(sum((x - sum(d) / n) ** 2 for x in d) / (n - 1) / n)
    half = stats.t.ppf(0.975, n - 1) * error
    assert result.p_value == pytest.approx(2 * stats.t.sf(abs(d.mean()) / error, n - 1), rel=1e-6)
    assert result.difference.estimate == pytest.approx(d.mean(), abs=1e-12)
    assert result.difference.low == pytest.approx(d.mean() - half, abs=1e-9)
    assert result.difference.high == pytest.approx(d.mean() + half, abs=1e-9)
    assert (result.n, result.mean_a, result.mean_b) == (n, pytest.approx(sum(a) / n), pytest.approx(sum(b) / n))
    assert result.std_a == pytest.approx(math.sqrt(sum((x - sum(a) / n) ** 2 for x in a) / (n - 1)), abs=1e-12)
    assert result.std_b == pytest.approx(math.sqrt(sum((x - sum(b) / n) ** 2 for x in b) / (n - 1)), abs=1e-12)


def test_false_positive_rate_and_coverage_over_seeds():
    rng, runs = np.random.default_rng(7), 1_000
    common = rng.normal(0.88, 0.01, size=(runs, 5))
    a, b = common + rng.normal(0.002, 0.003, size=(runs, 5)), common + rng.normal(0.002, 0.003, size=(runs, 5))
    comparisons = [paired_seeds(x, y) for x, y in zip(a, b, strict=True)]
    tolerance = 4 * math.sqrt(0.05 * 0.95 / runs)
    assert np.mean([comparison.p_value < 0.05 for comparison in comparisons]) == pytest.approx(0.05, abs=tolerance)
    covered = [comparison.difference.low <= 0 <= comparison.difference.high for comparison in comparisons]
    assert np.mean(covered) == pytest.approx(0.95, abs=tolerance)


def test_one_seed_gives_means_only():
    assert paired_seeds([0.9], [0.8]) == PairedSeeds(1, 0.9, None, 0.8, None, None, None)


def test_the_same_accuracy_with_every_seed_is_no_evidence():
    result = paired_seeds([0.9, 0.8, 0.7], [0.9, 0.8, 0.7])
    assert (result.difference, result.p_value) == (None, 1.0)
    assert result.std_a == pytest.approx(0.1)
    # the same fractions, computed in another way with another rounding
    assert paired_seeds([0.1 + 0.2, 0.5], [0.3, 0.5]).p_value == 1.0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("a", "b"), [([0.9, 0.8], [0.7, 0.6]), ([700 / 777, 690 / 777], [699 / 777, 689 / 777])])
def test_a_constant_difference_is_not_infinitely_significant(a, b):
    result = paired_seeds(a, b)
    assert (result.difference, result.p_value) == (None, None)


# The verdict


def test_the_verdict_of_identical_runs():
    assert verdict(paired_rows(*rows(0, 0, 777)), "A", "B", bitwise_identical=True) == "bitwise identical training"


def test_the_verdict_names_the_interval_even_without_disagreements():
    z2 = stats.norm.ppf(0.975) ** 2
    limit = f"{100 * z2 / (777 + z2):.1f}"
    assert verdict(paired_rows(*rows(0, 0, 777)), "ddp_loop", "trainer_run") == (
        f"indistinguishable at n = 777: the difference could be anywhere in [-{limit}, +{limit}] points"
    )


def test_the_verdict_names_the_better_run_in_any_order():
    a, b = rows(60, 20, 777)
    one, other = verdict(paired_rows(a, b), "first", "second"), verdict(paired_rows(b, a), "second", "first")
    assert one == other == f"first is better than second by {100 * 40 / 777:.1f} points at n = 777 (p < 0.001)"
    a, b = rows(30, 14, 777)
    p = 2 * sum(math.comb(44, k) for k in range(15)) / 2**44
    assert verdict(paired_rows(b, a), "x", "y").startswith("y is better than x")
    assert verdict(paired_rows(b, a), "x", "y").endswith(f"(p = {p:.2g})")


def test_the_verdict_is_borderline_if_test_and_interval_disagree():
    comparisons = paired_rows(*rows(6, 0, 777)), paired_rows(*rows(5, 0, 777))
    assert [round(comparison.p_value, 4) for comparison in comparisons] == [0.0312, 0.0625]
    assert verdict(comparisons[0], "A", "B").startswith("A is better than B")
    assert comparisons[1].difference.low > 0
    line = verdict(comparisons[1], "A", "B")
    assert line.startswith("borderline at n = 777")
    assert line.endswith("the test does not reject zero (p = 0.062)")


@given(discordant_counts())
def test_the_verdict_is_better_exactly_if_mcnemar_rejects(counts):
    result = paired_rows(*rows(*counts))
    line = verdict(result, "A", "B")
    assert ("is better than" in line) == (result.p_value < 0.05)
    assert line.startswith("A is better") == (result.p_value < 0.05 and result.a_only > result.b_only)
    assert line.startswith("indistinguishable") == (result.difference.low <= 0 <= result.difference.high)


def test_the_verdict_contains_no_negative_zero():
    comparisons = [paired_rows(*rows(a_only, b_only, 777)) for a_only in range(22) for b_only in range(22)]
    limits = [limit for comparison in comparisons for limit in (comparison.difference.low, comparison.difference.high)]
    assert any(-0.0005 < limit < 0 for limit in limits), "otherwise nothing would be rounded to zero"
    assert not [
        line for line in (verdict(comparison, "A", "B") for comparison in comparisons) if re.search(r"-0\.0\b", line)
    ]


def test_the_verdict_over_seeds():
    a, b = np.array([0.90, 0.91, 0.89, 0.90]), np.array([0.88, 0.89, 0.88, 0.87])
    result = paired_seeds(a, b)
    p = stats.ttest_1samp(a - b, 0).pvalue
    assert verdict(result, "A", "B") == f"A is better than B by 2.00 points over 4 seeds (p = {p:.2g})"
    near = paired_seeds([0.90, 0.91, 0.89], [0.91, 0.90, 0.89])
    low, high = stats.t.interval(0.95, 2, 0, stats.sem([-0.01, 0.01, 0.0]))
    assert verdict(near, "A", "B") == (
        "indistinguishable over 3 seeds: "
        f"the difference could be anywhere in [{100 * low:+.2f}, {100 * high:+.2f}] points"
    )


def test_the_verdict_is_undecided_if_the_variance_cannot_be_estimated():
    assert verdict(paired_seeds([0.9], [0.8]), "A", "B") == (
        "undecided over 1 seed: A - B is +10.00 points, but its variance cannot be estimated"
    )
    assert verdict(paired_seeds([0.8, 0.7], [0.9, 0.8]), "A", "B").startswith("undecided over 2 seeds: A - B is -10.00")
    same = verdict(paired_seeds([0.9, 0.8], [0.9, 0.8]), "A", "B")
    assert same == "indistinguishable over 2 seeds: the same accuracy with every seed"


@pytest.mark.parametrize(("n", "digits"), [(3, 1), (777, 1), (1000, 1), (10_000, 2), (100_000, 3)])
def test_the_verdict_has_as_many_decimals_as_one_row_can_change(n, digits):
    limits = verdict(paired_rows(*rows(0, 0, n)), "A", "B").split("[")[1].split("]")[0].split(", ")
    assert {len(limit.split(".")[1]) for limit in limits} == {digits}


# Calibration


@st.composite
def classified(draw):
    """Draw (n, classes) probabilities, many of them on the edges of bins, and labels."""
    n, classes = draw(st.integers(1, 60)), draw(st.integers(2, 5))
    weights = draw(st.lists(st.lists(st.integers(0, 15), min_size=classes, max_size=classes), min_size=n, max_size=n))
    counts = np.array(weights, dtype=float)
    counts[counts.sum(axis=1) == 0] = 1
    return counts / counts.sum(axis=1, keepdims=True), draw(
        st.lists(st.integers(0, classes - 1), min_size=n, max_size=n).map(np.array)
    )


@given(classified(), st.integers(1, 20))
def test_calibration_agrees_with_a_loop_and_with_scikit_learn(sample, bins):
    p, labels = sample
    table = calibration_bins(p, labels, bins)
    expected = 0.0
    for row, (low, high) in zip(table, pairwise(np.linspace(0, 1, bins + 1)), strict=True):
        inside = [i for i, x in enumerate(p) if low < max(x) <= high]
        assert (row.low, row.high, row.n) == (low, high, len(inside))
        if inside:
            accuracy_inside = sum(int(np.argmax(p[i])) == labels[i] for i in inside) / len(inside)
            confidence = sum(max(p[i]) for i in inside) / len(inside)
            assert (row.accuracy, row.confidence) == (pytest.approx(accuracy_inside), pytest.approx(confidence))
            assert row.interval == wilson_interval(round(accuracy_inside * len(inside)), len(inside))
            expected += len(inside) / len(p) * abs(accuracy_inside - confidence)
        else:
            assert row.accuracy is None
            assert row.confidence is None
            assert row.interval is None
    assert expected_calibration_error(table) == pytest.approx(expected, abs=1e-12)
    filled = [row for row in table if row.n]
    accuracy, confidence = calibration_curve(p.argmax(axis=1) == labels, p.max(axis=1), n_bins=bins)
    np.testing.assert_allclose([row.accuracy for row in filled], accuracy)
    np.testing.assert_allclose([row.confidence for row in filled], confidence)


@given(classified())
def test_calibration_error_in_one_bin_is_the_difference_of_the_means(sample):
    p, labels = sample
    gap = abs(float(np.mean(p.argmax(axis=1) == labels)) - float(p.max(axis=1).mean()))
    assert expected_calibration_error(calibration_bins(p, labels, 1)) == pytest.approx(gap, abs=1e-12)
    assert gap - 1e-12 <= expected_calibration_error(calibration_bins(p, labels)) <= 1, (
        "splitting a bin never reduces the error"
    )


def test_calibration_error_is_small_only_for_calibrated_probabilities():
    rng = np.random.default_rng(3)
    truth = rng.uniform(0.5, 1, size=50_000)
    labels = (rng.random(50_000) < truth).astype(int)
    assert expected_calibration_error(calibration_bins(np.column_stack([1 - truth, truth]), labels)) < 0.01
    sure = np.column_stack([np.zeros(50_000), np.ones(50_000)])
    assert expected_calibration_error(calibration_bins(sure, labels)) == pytest.approx(1 - labels.mean())


@pytest.mark.parametrize("p", [[[2.0, -1.0]], [[0.3, 0.3]], [[math.nan, 0.5]]], ids=["logits", "sum", "nan"])
def test_calibration_rejects_anything_but_probabilities(p):
    with pytest.raises(ValueError, match="probabilities"):
        calibration_bins(np.array(p), np.zeros(1, int))


# Length

LENGTHS = st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=200)


@given(LENGTHS, st.integers(1, 8))
def test_length_groups_partition_the_rows_in_order(sample, groups):
    lengths, correct = np.array([x for x, _ in sample]), np.array([y for _, y in sample])
    table = accuracy_by_length(lengths, correct, groups)
    assert 1 <= len(table) <= groups
    assert sum(row.n for row in table) == len(lengths)
    assert (table[0].shortest, table[-1].longest) == (lengths.min(), lengths.max())
    assert all(row.longest < following.shortest for row, following in pairwise(table))
    for row in table:
        hits = [ok for length, ok in sample if row.shortest <= length <= row.longest]
        assert row.accuracy == wilson_interval(sum(hits), len(hits))
        assert row.n == len(hits)


@given(st.integers(1, 8), st.integers(1, 30), st.randoms(use_true_random=False))
def test_distinct_lengths_give_groups_of_equal_size(groups, each, random):
    lengths = random.sample(range(10_000), groups * each)
    assert [row.n for row in accuracy_by_length(np.array(lengths), np.ones(len(lengths), bool), groups)] == [
        each
    ] * groups
