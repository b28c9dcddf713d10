"""Predict the step time on a cluster: many ranks, several on each node, each with a core or device of its own.

Exchanges cost what the α-β model says (app/bench/alpha_beta.py), with one α and β within nodes and one
between them. The ranks of a node share its link to the other nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from ..alpha_beta import ring_all_gather, ring_all_reduce, tree_all_reduce
from .step_model import Computation, Cores, one_after_another, predict_step

ALGORITHMS = ("ring", "tree", "hierarchical")


@dataclass(frozen=True)
class Hop:
    """A message between two ranks.

    Attributes:
        alpha: latency in seconds.
        beta: seconds per byte.
    """

    alpha: float
    beta: float


@dataclass(frozen=True)
class Cluster:
    """Nodes with the same number of ranks.

    Attributes:
        within: a message between two ranks of a node.
        between: a message between two nodes.
    """

    ranks_per_node: int
    within: Hop
    between: Hop

    def all_reduce(self, algorithm: str, ranks: int, size: int) -> float:
        """Return the seconds of an all-reduce.

        `ring`: one ring through all nodes, which enters and leaves each node once. Its messages all travel at the same
        time, so that the slower hop determines the time of each round. `tree`: two binary trees over the nodes, and two
        over the ranks of each node; again the slower hop limits the rate, and latencies add up along the path.
        `hierarchical`: a ring reduce-scatter within each node, ring all-reduces between the nodes, in which each rank
        of a node has its part of the tensor and its share of the link, and a ring all-gather within each node. The
        exchange of `app.strategies.reduction` in two levels has as many messages and bytes.

        Args:
            algorithm: one of `ALGORITHMS`.
            ranks: in total. More than `ranks_per_node` fill complete nodes.
            size: of the tensor in bytes.
        """
        inside = min(ranks, self.ranks_per_node)
        nodes = math.ceil(ranks / self.ranks_per_node)
        slower = max(self.within.beta, self.between.beta) if nodes > 1 else self.within.beta
        if algorithm == "ring":
            alpha = max(self.within.alpha, self.between.alpha) if nodes > 1 else self.within.alpha
            return ring_all_reduce(ranks, size, alpha=alpha, beta=slower)
        if algorithm == "tree":
            latency = tree_all_reduce(inside, 0, alpha=self.within.alpha, beta=0) + tree_all_reduce(
                nodes, 0, alpha=self.between.alpha, beta=0
            )
            return latency + tree_all_reduce(ranks, size, alpha=0, beta=slower)
        assert algorithm == "hierarchical", algorithm
        within = ring_all_gather(inside, size, alpha=self.within.alpha, beta=self.within.beta)
        return 2 * within + ring_all_reduce(nodes, size, alpha=self.between.alpha, beta=self.between.beta)


@dataclass(frozen=True)
class OneAfterAnother:
    """A network that exchanges one bucket after another and takes no time from computations. Implements `Network`."""

    seconds: Callable[[int], float]

    @property
    def start(self) -> float:
        """Nothing: the broadcast of the buffers is left out."""
        return 0.0

    def finish(self, ready: Sequence[float], sizes: Sequence[int]) -> list[float]:
        """Return when each bucket's exchange has finished."""
        return one_after_another(ready, [self.seconds(size) for size in sizes])

    def cpu_seconds(self, size: int) -> float:
        """Return 0."""
        return 0.0


def predict_cluster_step(computation: Computation, cluster: Cluster, algorithm: str, *, ranks: int) -> float:
    """Return the predicted seconds of a step."""
    network = OneAfterAnother(lambda size: cluster.all_reduce(algorithm, ranks, size))
    return predict_step(computation, network, Cores(2 * ranks, ranks))


def computation_of_rows(rows: float, measured: dict[int, Computation]) -> Computation:
    """Return the computation for any number of rows: a straight line through the measured ones.

    A step consists of work that is proportional to its rows, and of the update of the weights, which is not. Neither
    takes a negative time, whatever the noise of the measurements.

    Args:
        rows: more than 0.
        measured: by the number of rows, for two numbers or more.
    """
    counts = sorted(measured)
    # The errors are relative, as in `fit_alpha_beta`.
    times = np.array([[measured[n].seconds, *(at for _, at in measured[n].buckets)] for n in counts])
    design = np.stack([np.ones(len(counts)), np.array(counts, dtype=np.float64)], axis=1)
    line = [nnls(design / column[:, None], np.ones(len(counts)))[0] for column in times.T]
    seconds, *ready = (float(constant + slope * rows) for constant, slope in line)
    sizes = [size for size, _ in measured[counts[0]].buckets]
    return Computation(seconds, tuple(zip(sizes, ready, strict=True)))
