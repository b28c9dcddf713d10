"""The statistics of comparing two classifiers: intervals, paired tests, calibration, and a verdict in one line.

Pure functions on arrays. Two questions have different answers:
- `paired_rows` is about the *test rows*: would these two trained models differ on other rows from the same source?
- `paired_seeds` is about the *training*: would the two training methods differ on average over seeds, on these test
  rows?

Accuracies and differences are fractions; only `verdict` uses percentage points. A difference is always A - B.
"""

from dataclasses import dataclass
from math import ceil, log10, sqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

CONFIDENCE = 0.95  # of all intervals
Z = float(stats.norm.ppf((1 + CONFIDENCE) / 2))


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its two-sided confidence interval, `low <= estimate <= high`."""

    estimate: float
    low: float
    high: float
    confidence: float = CONFIDENCE


@dataclass(frozen=True, slots=True)
class PairedRows:
    """Two runs on the same `n` test rows. `a_only` counts the rows that A classifies correctly and B does not."""

    n: int
    a_only: int
    b_only: int
    accuracy_a: Interval
    accuracy_b: Interval
    difference: Interval
    p_value: float


@dataclass(frozen=True, slots=True)
class PairedSeeds:
    """Two training methods over the same `n` seeds. Values that cannot be estimated are None: see `paired_seeds`."""

    n: int
    mean_a: float
    std_a: float | None
    mean_b: float
    std_b: float | None
    difference: Interval | None
    p_value: float | None


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """The `n` rows whose highest probability is in (low, high].

    `interval` is Wilson's of the accuracy. It and the means are None if there are no such rows.
    """

    low: float
    high: float
    n: int
    confidence: float | None
    accuracy: float | None
    interval: Interval | None


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """The `n` rows whose lengths range from `shortest` to `longest`, and their accuracy."""

    shortest: float
    longest: float
    n: int
    accuracy: Interval


def wilson_interval(correct: int, n: int) -> Interval:
    """Return Wilson's score interval for an accuracy of `n` >= 1 rows. Wilson (1927), JASA 22:209."""
    limits = stats.binomtest(correct, n).proportion_ci(CONFIDENCE, method="wilson")
    return Interval(correct / n, float(limits.low), float(limits.high))


def mcnemar_exact(a_only: int, b_only: int) -> float:
    """Return the exact two-sided p-value of McNemar's test: a_only ~ Binomial(a_only + b_only, 1/2).

    McNemar (1947), Psychometrika 12:153. Rows that both runs classify correctly, or both incorrectly, carry no
    information; without any other rows, p is 1.
    """
    return float(stats.binomtest(a_only, a_only + b_only, 0.5).pvalue) if a_only + b_only else 1.0


def paired_difference_interval(a_only: int, b_only: int, n: int) -> Interval:
    """Return Tango's score interval for accuracy(A) - accuracy(B) on the same `n` rows.

    It contains all d that a score test does not reject: |a_only - b_only - n d| <= z sqrt(n (2 q(d) + d (1 - d))),
    where q(d) is the maximum-likelihood estimate of P(only B is correct) given d. Tango (1998), Statistics in Medicine
    17:891. Good for small n and few disagreements; without any it is +-z^2 / (n + z^2), never a single point.
    """
    low, high = -_tango_upper_limit(b_only, a_only, n), _tango_upper_limit(a_only, b_only, n)
    return Interval((a_only - b_only) / n, low, high)


def _tango_upper_limit(a_only: int, b_only: int, n: int) -> float:
    estimate = (a_only - b_only) / n

    def beyond(d: float) -> float:
        """Return n (d - estimate) - z * standard deviation, which is negative if the score test does not reject d."""
        linear = (2 * n - a_only + b_only) * d - a_only - b_only
        root = sqrt(max(0.0, linear**2 + 8 * n * b_only * d * (1 - d)))
        only_b = (root - linear) / (4 * n)
        return n * (d - estimate) - Z * sqrt(max(0.0, n * (2 * only_b + d * (1 - d))))

    # Start to the right of the estimate: without disagreements the variance is 0 there and the estimate is a root.
    return float(optimize.brentq(beyond, estimate + 1e-9 * (1 - estimate), 1.0, xtol=1e-12))


def paired_rows(a: NDArray[np.bool_], b: NDArray[np.bool_]) -> PairedRows:
    """Compare two runs row by row: Wilson's interval of each, Tango's of the difference, McNemar's exact p-value.

    `a` and `b` (n,) tell whether A and B classify each row correctly, with the rows in the same order.
    """
    n, a_only, b_only = len(a), int((a & ~b).sum()), int((b & ~a).sum())
    accuracy_a, accuracy_b = (wilson_interval(int(x.sum()), n) for x in (a, b))
    difference = paired_difference_interval(a_only, b_only, n)
    return PairedRows(n, a_only, b_only, accuracy_a, accuracy_b, difference, mcnemar_exact(a_only, b_only))


def paired_seeds(a: ArrayLike, b: ArrayLike) -> PairedSeeds:
    """Compare two training methods over seeds: mean, standard deviation (ddof = 1), Student's paired t test.

    With one seed, standard deviations, interval and p-value are None. If the difference is the same for all seeds, its
    variance cannot be estimated: there is no interval, and a p-value (1) only if the difference is zero.

    `a` and `b` (seeds,) are a metric of A and of B, with the seeds in the same order.
    """
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    n, difference, interval, p_value = len(a), a - b, None, None
    rounding = 4 * np.finfo(np.float64).eps * np.abs([a, b]).max()
    if n > 1 and np.ptp(difference) > rounding:
        test = stats.ttest_rel(a, b)
        limits = test.confidence_interval(CONFIDENCE)
        interval = Interval(float(difference.mean()), float(limits.low), float(limits.high))
        p_value = float(test.pvalue)
    elif n > 1 and np.abs(difference).max() <= rounding:
        p_value = 1.0
    std_a, std_b = (float(x.std(ddof=1)) if n > 1 else None for x in (a, b))
    return PairedSeeds(n, float(a.mean()), std_a, float(b.mean()), std_b, interval, p_value)


def verdict(statistics: PairedRows | PairedSeeds, name_a: str, name_b: str, *, bitwise_identical: bool = False) -> str:
    """Return the conclusion of a comparison as one line of plain text, in which names are not escaped.

    "Better" requires p < 1 - confidence *and* an interval without zero. McNemar's exact test is stricter than Tango's
    interval: close to the threshold they may disagree, and the line then reports "borderline".
    """
    if bitwise_identical:
        return "bitwise identical training"
    n = statistics.n
    if isinstance(statistics, PairedRows):  # one row is 100 / n points: far smaller decimals are meaningless
        scope, gap, decimals = f"at n = {n}", statistics.difference.estimate, max(1, ceil(log10(n)) - 2)
    else:
        scope, gap, decimals = f"over {n} seed{'s' * (n > 1)}", statistics.mean_a - statistics.mean_b, 2
    interval, p = statistics.difference, statistics.p_value
    if interval is None or p is None:
        if p is not None:
            return f"indistinguishable {scope}: the same accuracy with every seed"
        difference = f"{name_a} - {name_b} is {100 * gap:+z.{decimals}f} points"
        return f"undecided {scope}: {difference}, but its variance cannot be estimated"
    within = f"[{100 * interval.low:+z.{decimals}f}, {100 * interval.high:+z.{decimals}f}] points"
    if interval.low <= 0 <= interval.high:
        return f"indistinguishable {scope}: the difference could be anywhere in {within}"
    chance = "p < 0.001" if p < 0.001 else f"p = {p:.2g}"
    if p >= 1 - CONFIDENCE:
        return f"borderline {scope}: the difference is in {within}, but the test does not reject zero ({chance})"
    better, worse = (name_a, name_b) if gap > 0 else (name_b, name_a)
    return f"{better} is better than {worse} by {100 * abs(gap):.{decimals}f} points {scope} ({chance})"


def calibration_bins(
    probabilities: NDArray[np.float64], labels: NDArray[np.int64], bins: int = 15
) -> list[CalibrationBin]:
    """Return the bins of a reliability diagram, ((m - 1) / bins, m / bins] of the highest probability.

    Guo et al. (2017), "On Calibration of Modern Neural Networks", section 2. `labels` (n,) are columns of
    `probabilities` (n, classes).

    Raises:
        ValueError: a probability is negative, or a row does not sum to 1.
    """
    if not (probabilities.min() >= 0 and np.allclose(probabilities.sum(axis=1), 1, atol=1e-2)):
        raise ValueError("probabilities must be >= 0 with rows summing to 1")
    top, correct = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    edges = np.linspace(0, 1, bins + 1)
    bin_of_row = np.searchsorted(edges[1:-1], top, side="left")  # right-closed, as in the paper
    table = []
    for m in range(bins):
        rows = bin_of_row == m
        n = int(rows.sum())
        confidence, accuracy = (float(values[rows].mean()) if n else None for values in (top, correct))
        interval = wilson_interval(int(correct[rows].sum()), n) if n else None
        table.append(CalibrationBin(float(edges[m]), float(edges[m + 1]), n, confidence, accuracy, interval))
    return table


def expected_calibration_error(table: list[CalibrationBin]) -> float:
    """Return ECE = sum over bins of (n_bin / n) |accuracy - confidence|, in [0, 1]: Guo et al. (2017), equation 3."""
    gaps = (row.n * abs((row.accuracy or 0.0) - (row.confidence or 0.0)) for row in table)  # an empty bin adds 0
    return sum(gaps) / sum(row.n for row in table)


def accuracy_by_length(lengths: NDArray[np.integer], correct: NDArray[np.bool_], groups: int = 4) -> list[LengthGroup]:
    """Return the accuracy of short to long rows, with its Wilson interval, in groups of about equal size.

    The edges of the groups are quantiles of `lengths`. Rows of the same length are in the same group, so there may be
    fewer groups.
    """
    cuts = np.unique(np.quantile(lengths, np.arange(1, groups) / groups))
    group_of_row = np.searchsorted(cuts, lengths, side="left")
    table = []
    for group in np.unique(group_of_row):
        rows = group_of_row == group
        n, shortest, longest = int(rows.sum()), lengths[rows].min().item(), lengths[rows].max().item()
        table.append(LengthGroup(shortest, longest, n, wilson_interval(int(correct[rows].sum()), n)))
    return table
