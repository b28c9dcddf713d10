"""The statistics of comparing two classifiers: intervals, a paired test, and a verdict in one line.

Paired by test rows: would these two trained models differ on other rows from the same source? Paired by seeds: would
the two training methods differ on average over seeds, on these test rows?

Accuracies and differences are fractions; only `verdict` uses percentage points. A difference is always A - B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from ..common.formats import points

CONFIDENCE = 0.95  # of all intervals
Interval = dict[str, float]  # `estimate`, and the two-sided confidence interval: `low`, `high` and `confidence`


@dataclass(frozen=True, slots=True)
class Paired:
    """A value of A and of B for each of the same `n` rows or seeds, and Student's paired t test.

    One value has no standard deviation. If all differences are equal, there is no interval and no p-value.
    """

    n: int
    mean_a: float
    std_a: float | None
    mean_b: float
    std_b: float | None
    difference: Interval | None
    p_value: float | None


def paired(a: ArrayLike, b: ArrayLike) -> Paired:
    """Compare the values of A and of B, (n,), with the rows or seeds in the same order."""
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    n, gaps, difference, p_value = len(a), a - b, None, None
    rounding = 4 * np.finfo(np.float64).eps * np.abs([a, b]).max()
    if n > 1 and np.ptp(gaps) > rounding:
        test = stats.ttest_rel(a, b)
        limits = test.confidence_interval(CONFIDENCE)
        difference = _interval(gaps.mean(), limits)
        p_value = float(test.pvalue)
    std_a, std_b = (float(x.std(ddof=1)) if n > 1 else None for x in (a, b))
    return Paired(n, float(a.mean()), std_a, float(b.mean()), std_b, difference, p_value)


def wilson_interval(correct: int, n: int) -> Interval:
    """Return Wilson's score interval for an accuracy of `n` >= 1 rows. Wilson (1927), JASA 22:209."""
    limits = stats.binomtest(correct, n).proportion_ci(CONFIDENCE, method="wilson")
    return _interval(correct / n, limits)


def _interval(estimate: float, limits: Any) -> Interval:
    return {"estimate": float(estimate), "low": float(limits.low), "high": float(limits.high), "confidence": CONFIDENCE}


def verdict(compared: Paired, name_a: str, name_b: str, *, unit: str) -> str:
    """Return the conclusion as one line of plain text. `unit` is what was paired, in the singular."""
    gap, interval, p_value = compared.mean_a - compared.mean_b, compared.difference, compared.p_value
    over = f"over {compared.n:,} {unit}{'s' * (compared.n > 1)}"
    if interval is None or p_value is None:
        return f"Undecided {over}: {name_a} − {name_b} is {points(gap)} points on each of them"
    if p_value >= 1 - CONFIDENCE:
        within = f"[{points(interval['low'])}, {points(interval['high'])}] points"
        return f"Indistinguishable {over}: the difference could be anywhere in {within}"
    better, worse = (name_a, name_b) if gap > 0 else (name_b, name_a)
    chance = "p < 0.001" if p_value < 0.001 else f"p = {p_value:.2g}"
    return f"{better} is better than {worse} by {100 * abs(gap):.2f} points {over} ({chance})"
