"""The statistics against published values and scipy, and the verdict that follows from them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from app.report.statistics import paired, verdict, wilson_interval

INDISTINGUISHABLE = "Indistinguishable over 4 seeds: the difference could be anywhere in"


def test_the_interval_of_an_accuracy_is_wilsons():
    """Newcombe 1998, "Two-sided confidence intervals for the single proportion", table 1, method 3."""
    interval = wilson_interval(15, 148)
    found = [interval[name] for name in ("estimate", "low", "high")]
    assert found == pytest.approx([15 / 148, 0.0624, 0.1605], abs=5e-5)


def test_values_are_paired_as_in_the_t_test_of_their_differences():
    a, b = np.random.default_rng(0).uniform(0.8, 0.9, (2, 12))
    found, expected = paired(a, b), stats.ttest_1samp(a - b, 0)
    low, high = expected.confidence_interval(0.95)
    assert (found.n, found.p_value) == (12, pytest.approx(expected.pvalue))
    interval = tuple(found.difference[name] for name in ("low", "estimate", "high"))
    assert interval == pytest.approx((low, np.mean(a - b), high))
    of_each = (found.mean_a, found.std_a, found.mean_b, found.std_b)
    assert of_each == pytest.approx((a.mean(), stats.tstd(a), b.mean(), stats.tstd(b)))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("a", "b", "line"),
    [
        ([0.90, 0.91, 0.89, 0.90], [0.88, 0.89, 0.88, 0.87], "A is better than B by 2.00 points over 4 seeds (p = "),
        # The test rejects exactly if the interval does not contain 0.
        ([0.9] * 4, [0.901, 0.909, 0.908, 0.906], "B is better than A by 0.60 points over 4 seeds (p = 0.043)"),
        ([0.9] * 4, [0.9005, 0.9085, 0.9075, 0.9055], f"{INDISTINGUISHABLE} [−1.12, +0.02] points"),
        ([0.8], [0.9], "Undecided over 1 seed: A − B is −10.00 points on each of them"),
        ([700 / 777, 690 / 777], [699 / 777, 689 / 777], "Undecided over 2 seeds"),
        ([0.9, 0.8, 0.7], [0.9, 0.8, 0.7], "Undecided over 3 seeds"),
        ([0.3, 0.3], [0.1 + 0.2, 0.3], "Undecided over 2 seeds: A − B is +0.00 points"),  # only the rounding differs
    ],
)
def test_the_verdict_states_size_and_certainty_and_a_constant_difference_is_not_infinitely_significant(a, b, line):
    result = paired(a, b)
    assert verdict(result, "A", "B", unit="seed").startswith(line)
    assert (result.difference is None) == (result.p_value is None) == line.startswith("Undecided")
