"""Predict the step time on a cluster: many ranks, several on each node, each with a core or device of its own.

Exchanges cost what the α-β model says (app/bench/alpha_beta.py): see docs/scaling.md#a-cluster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from ..alpha_beta import ring_all_gather, ring_all_reduce, tree_all_reduce
from .step_model import Computation, Cores, Network, one_after_another, predict_step

ALGORITHMS = ("ring", "tree", "hierarchical")


class Hop(NamedTuple):
    """A message between two ranks: its latency in seconds, and the seconds per byte."""

    alpha: float
    beta: float


@dataclass(frozen=True)
class Cluster:
    """Nodes with the same number of ranks."""

    ranks_per_node: int
    within: Hop  # between two ranks of a node
    between: Hop  # between two nodes; the ranks of a node share this link

    def all_reduce(self, algorithm: str, ranks: int, size: int) -> float:
        """Return the seconds of an all-reduce.

        Args:
            algorithm: one of `ALGORITHMS`.
            ranks: in total. More than `ranks_per_node` fill complete nodes.
            size: of the tensor in bytes.
        """
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
