"""The α-β model of communication: seconds = α + β x bytes, and what collectives cost in it.

α is the latency of a message and β the time per byte, the inverse of the bandwidth (Hockney, "The communication
challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20, 1994). The same line describes a point-to-point
message and, with its own α and β, a collective among a fixed number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls
from scipy.stats import t as student

FEWEST_POINTS = 3
ROUNDING = 16  # of fitted / measured in units of the machine's epsilon, after the few operations of a fit


@dataclass(frozen=True)
class AlphaBeta:
    """A fitted line, seconds = alpha + beta * bytes."""

    alpha: float  # latency in seconds
    beta: float  # seconds per byte
    alpha_error: float  # standard errors
    beta_error: float
    covariance: float  # of the estimates of alpha and beta
    scatter: float  # standard deviation of fitted / measured - 1
    relative_error: float  # median of |fitted / measured - 1| over the points
    points: int  # that were fitted

    def seconds(self, size: float, messages: float = 1) -> float:
        """Return the predicted time of messages that are sent one after another, and have `size` bytes together."""
        return messages * self.alpha + size * self.beta

    def scaled(self, factor: float) -> AlphaBeta:
        """Return the line of times that are `factor` times as long."""
        return replace(
            self,
            alpha=self.alpha * factor,
            beta=self.beta * factor,
            alpha_error=self.alpha_error * factor,
            beta_error=self.beta_error * factor,
            covariance=self.covariance * factor**2,
        )

    def prediction_interval(self, size: float, confidence: float = 0.95) -> tuple[float, float]:
        """Return the interval in which the measured time of another tensor is expected, in seconds."""
        middle = self.seconds(size)
        variance = self.alpha_error**2 + (size * self.beta_error) ** 2
        variance += 2 * size * self.covariance + (self.scatter * middle) ** 2
        half = float(student.ppf((1 + confidence) / 2, self.points - 2)) * math.sqrt(max(0.0, variance))
        return max(0.0, middle - half), middle + half


def fit_alpha_beta(sizes: Sequence[float], seconds: Sequence[float]) -> AlphaBeta:
    """Fit α and β, neither of them negative, to measured times.

    Minimizes the sum of squared *relative* errors. The sizes span many orders of magnitude, so absolute errors would
    leave α undetermined: the largest message's noise alone is longer than the latency. Errors are relative to the
    measured time, so a point that was delayed by something else has little influence.

    The standard errors are those of linear regression without bounds, also where α or β is zero. A β below its standard
    error is zero: the times do not tell whether bytes take any, and 1 / β would be arbitrary.

    Raises:
        ValueError: fewer than three different sizes, a negative size, or a time that is not positive.
    """
    n, t = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if n.shape != t.shape or n.ndim != 1:
        raise ValueError(f"{n.shape} sizes and {t.shape} times")
    if len(np.unique(n)) < FEWEST_POINTS:
        raise ValueError(f"a fit with errors needs {FEWEST_POINTS} different sizes")
    if not (np.isfinite(n).all() and np.isfinite(t).all() and (n >= 0).all() and (t > 0).all()):
        raise ValueError("sizes cannot be negative, and times have to be positive")
    design = np.stack([1 / t, n / t], axis=1)  # its product with (α, β) is fitted / measured, which should be 1
    scale = np.linalg.norm(design, axis=0)  # otherwise, n makes the problem ill-conditioned
    inverse = np.linalg.inv((design / scale).T @ (design / scale)) / np.outer(scale, scale)
    scaled, residual = nnls(design / scale, np.ones(len(n)))
    alpha, beta = scaled / scale
    if beta < math.sqrt(_variance(residual, len(n)) * inverse[1, 1]):
        alpha, beta = design[:, 0].sum() / scale[0] ** 2, 0.0  # the same least squares without β
        residual = np.linalg.norm(alpha * design[:, 0] - 1)
    variance = _variance(residual, len(n))
    fitted = alpha + beta * n
    return AlphaBeta(
        alpha=float(alpha),
        beta=float(beta),
        alpha_error=math.sqrt(variance * inverse[0, 0]),
        beta_error=math.sqrt(variance * inverse[1, 1]),
        covariance=float(variance * inverse[0, 1]),
        scatter=math.sqrt(variance),
        relative_error=float(np.median(np.abs(fitted / t - 1))),
        points=len(n),
    )


def _variance(residual: float, points: int) -> float:
    """Return the variance of fitted / measured. It is never below that of rounding: else a β of 1e-28 has no error."""
    return max(residual**2 / (points - 2), (ROUNDING * float(np.finfo(np.float64).eps)) ** 2)


# ---- what collectives cost -----------------------------------------------------------------------------------------
# Here α and β are those of a message between two ranks, and `size` is the number of bytes of the complete tensor. The
# time of the additions, γ in the papers, is left out. All costs are linear in α and β: with α = 1 and β = 0 they return
# the number of messages, and with α = 0 and β = 1 the number of bytes, that a rank sends one after another.


def ring_all_gather(ranks: int, size: float, *, alpha: float, beta: float) -> float:
    """Return the seconds of a ring all-gather, or of a ring reduce-scatter, which sends the same.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19,
    2005, section 4.1.
    """
    return (ranks - 1) * (alpha + size / ranks * beta)


def ring_all_reduce(ranks: int, size: float, *, alpha: float, beta: float) -> float:
    """Return the seconds of a ring all-reduce: a reduce-scatter and an all-gather.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69, 2009.
    gloo's default, and NCCL's for large tensors.
    """
    return 2 * ring_all_gather(ranks, size, alpha=alpha, beta=beta)


def tree_all_reduce(ranks: int, size: float, *, alpha: float, beta: float) -> float:
    """Return the seconds of an all-reduce along two binary trees: a pipelined reduction and a pipelined broadcast.

    Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
    Computing 35, 2009, without the terms of lower order for filling the pipeline. NCCL's algorithm since 2.4 if the
    latency of a ring is too long. A single tree that sends complete tensors costs 2⌈log₂(ranks)⌉ (α + β size).
    """
    if ranks == 1:
        return 0.0
    return 2 * math.ceil(math.log2(ranks)) * alpha + 2 * size * beta


def bus_bandwidth_factor(collective: str, ranks: int) -> float:
    """Return what to multiply the algorithm bandwidth (bytes / seconds) by to compare it with that of the links.

    Source: NVIDIA's nccl-tests, doc/PERFORMANCE.md. As there, the size is that of the complete tensor, so for an
    all-gather what a rank has at the end, and for an all-to-all what it has in total.

    Raises:
        ValueError: the collective is unknown.
    """
    if collective in ("broadcast", "reduce"):
        return 1.0
    if collective == "all-reduce":
        return 2 * (ranks - 1) / ranks
    if collective in ("all-gather", "reduce-scatter", "all-to-all", "gather", "scatter"):
        return (ranks - 1) / ranks
    raise ValueError(f"no bus bandwidth is defined for {collective}")
