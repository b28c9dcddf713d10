"""Predict the step time on a cluster: many ranks, several on each node, each with a core or device of its own.

Exchanges cost what the α-β model says (app/bench/alpha_beta.py): see docs/scaling.md#a-cluster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy as np
from scipy.integrate import quad
from scipy.optimize import nnls
from scipy.stats import norm

from ..alpha_beta import ring_all_gather, ring_all_reduce, tree_all_reduce
from .configuration import Hop
from .predict import Computation, Cores, Network, one_after_another, predict_step

ALGORITHMS = ("ring", "tree", "hierarchical")


@dataclass(frozen=True)
class Cluster:
    """Nodes with the same number of ranks."""

    ranks_per_node: int
    within: Hop  # between two ranks of a node
    between: Hop  # between two nodes; the ranks of a node share this link

    def all_reduce(self, algorithm: str, ranks: int, size: int) -> float:
        """Return the seconds of an all-reduce. More than `ranks_per_node` ranks fill complete nodes."""
        within, between = self.within, self.between
        inside = min(ranks, self.ranks_per_node)
        nodes = math.ceil(ranks / self.ranks_per_node)
        hops = [within, between] if nodes > 1 else [within]
        slower = max(hop.beta for hop in hops)
        if algorithm == "ring":
            # One ring through all nodes. Its messages travel at the same time: the slower hop determines each round.
            return ring_all_reduce(ranks, size, alpha=max(hop.alpha for hop in hops), beta=slower)
        if algorithm == "tree":
            # Two trees over the nodes, and two over the ranks of each. Latencies add up along the path.
            latency = tree_all_reduce(inside, 0, alpha=within.alpha, beta=0)
            latency += tree_all_reduce(nodes, 0, alpha=between.alpha, beta=0)
            return latency + tree_all_reduce(ranks, size, alpha=0, beta=slower)
        assert algorithm == "hierarchical", algorithm
        # Between the nodes, each rank of a node has its part of the tensor and its share of the link.
        local = 2 * ring_all_gather(inside, size, alpha=within.alpha, beta=within.beta)
        return local + ring_all_reduce(nodes, size, alpha=between.alpha, beta=between.beta)


def predict_cluster_step(computation: Computation, cluster: Cluster, algorithm: str, *, ranks: int) -> float:
    """Return the predicted seconds of a step. Exchanges take no CPU time from computations."""
    network = Network(one_after_another(lambda size: cluster.all_reduce(algorithm, ranks, size)))
    return predict_step(computation, network, Cores(ranks, ranks))


@dataclass(frozen=True)
class LinearComputation:
    """The computation of a step for any number of rows: each of its parts takes a constant time and a time per row.

    A part ends when a bucket of gradients is ready; the last one, the update, ends with the step. No time is negative,
    so a step with N times the rows takes at most N times as long: no predicted efficiency exceeds 100%.
    """

    sizes: tuple[int, ...]  # bytes of the buckets
    constant: tuple[float, ...]  # seconds of each part
    per_row: tuple[float, ...]

    def of_rows(self, rows: float) -> Computation:
        parts = (constant + rows * slope for constant, slope in zip(self.constant, self.per_row, strict=True))
        *ready, seconds = accumulate(parts)
        return Computation(seconds, tuple(zip(self.sizes, ready, strict=True)))


def fit_rows(measured: Mapping[int, Computation]) -> LinearComputation:
    """Fit a straight line without negative coefficients to each part of the computations, by their numbers of rows.

    Parts are fitted rather than the times at which they end: such lines could cross, and then a bucket would be ready
    before the one that precedes it.
    """
    counts = sorted(measured)
    ends = np.array([[0.0, *(at for _, at in measured[n].buckets), measured[n].seconds] for n in counts])
    # Errors are relative to the step, as those of `fit_alpha_beta` are to the measured time.
    weights = 1 / ends[:, -1:]
    design = np.stack([np.ones(len(counts)), np.array(counts, dtype=np.float64)], axis=1)
    lines = [nnls(design * weights, part * weights[:, 0])[0] for part in np.diff(ends).T]
    constant, per_row = zip(*((float(a), float(b)) for a, b in lines), strict=True)
    return LinearComputation(tuple(size for size, _ in measured[counts[0]].buckets), constant, per_row)


def straggling(ranks: int, variation: float) -> float:
    """Return how much longer the slowest of several ranks computes than the average rank.

    Args:
        variation: the coefficient of variation (standard deviation / mean) of the ranks' times in a step, which are
            assumed to be independent and normally distributed.
    """
    return 1 + variation * expected_maximum(ranks)


@cache
def expected_maximum(count: int) -> float:
    """Return the mean of the largest of several independent values from the standard normal distribution.

    Source: Tippett, "On the extreme individuals and the range of samples taken from a normal population", Biometrika
    17, 1925. About √(2 ln(count)) for large counts.
    """
    value, _ = quad(lambda x: x * count * norm.pdf(x) * norm.cdf(x) ** (count - 1), -10, 10)
    return float(value)
