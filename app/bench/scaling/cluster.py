"""Predict the step time on a cluster: many ranks, several on each node, each with a core or device of its own.

Exchanges cost what the α-β model says (app/bench/alpha_beta.py): see docs/scaling.md#a-cluster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from ...common.charts import Series
from ...common.formats import format_bandwidth
from ...distributed.world import powers_of_two
from ..alpha_beta import AlphaBeta, ring_all_gather, ring_all_reduce, tree_all_reduce
from ..charts import format_seconds, over_ranks
from ..page import Figure, Section, Table
from ..rounds import Interval
from .measure import MODES, ScalingPlan
from .predict import Computation, Cores, Fits, Network, one_after_another, over, predict_step

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


def computation_of_rows(rows: float, measured: Mapping[int, Computation]) -> Computation:
    """Return the computation for any number of rows: a straight line through the measured ones.

    A step consists of work that is proportional to its rows, and of the update of the weights, which is not. Neither
    takes a negative time, whatever the noise of the measurements.
    """
    counts = sorted(measured)
    # The errors are relative, as in `fit_alpha_beta`.
    times = np.array([[measured[n].seconds, *(at for _, at in measured[n].buckets)] for n in counts])
    design = np.stack([np.ones(len(counts)), np.array(counts, dtype=np.float64)], axis=1)
    line = [nnls(design / column[:, None], np.ones(len(counts)))[0] for column in times.T]
    seconds, *ready = (float(constant + slope * rows) for constant, slope in line)
    sizes = [size for size, _ in measured[counts[0]].buckets]
    return Computation(seconds, tuple(zip(sizes, ready, strict=True)))


LARGEST_CLUSTER = 1024  # ranks


@dataclass(frozen=True)
class ClusterFlags:
    """The cluster that the user has described."""

    ranks_per_node: int
    link: Hop | None  # between nodes; None: as measured
    node: Hop | None  # between the ranks of a node
    batch: int  # rows of a step in strong scaling


def cluster_section(plan: ScalingPlan, fits: Fits, flags: ClusterFlags, *, measured: Mapping[int, Interval]) -> Section:
    """Return the section. `measured`: steps of weak scaling by the number of ranks that have a core each."""
    predicted = {
        mode: {name: _cluster_points(mode, name, plan, fits=fits, flags=flags) for name in ALGORITHMS} for mode in MODES
    }
    within = _describe_hop(flags.node, fits.local, "measured on this machine")
    assumed = "not measured: assumed to be as fast as within this machine"
    over_link = "measured over the unshaped link" if fits.link else assumed
    between = _describe_hop(flags.link, fits.link or fits.local, over_link)
    parts: list[Table | Figure] = []
    for mode, of_mode in predicted.items():
        strong = mode == "strong"
        base = of_mode["ring"][1].middle
        rows = [
            [f"{n:,}", *(format_seconds(of_mode[name][n].middle) for name in ALGORITHMS)]
            + [f"{base / of_mode[name][n].middle / (n if strong else 1):.0%}" for name in ALGORITHMS]
            for n in of_mode["ring"]
        ]
        per = f"{flags.batch} rows per step" if strong else f"{plan.rows} rows per rank"
        header = ["ranks", *ALGORITHMS, *(f"efficiency, {name}" for name in ALGORITHMS)]
        parts.append(Table(f"{mode} scaling, {per}: time of a step", header, rows))
        # Strong scaling on a cluster has more rows than the measured steps.
        points = {} if strong else measured
        parts.append(_figure(mode, "time of a step", points, by_algorithm=of_mode, seconds=True))
        ratios = {name: {n: over(base, times) for n, times in of_mode[name].items()} for name in ALGORITHMS}
        points = {n: over(points[1].middle, times) for n, times in points.items()} if 1 in points else {}
        parts.append(_figure(mode, "speedup over one rank" if strong else "efficiency", points, by_algorithm=ratios))
    return Section(
        "cluster",
        "A cluster",
        [
            f"Predicted, not measured: nodes of {flags.ranks_per_node} ranks, each with a core of its own. Within a "
            f"node: {within}. Between nodes, whose ranks share one link: {between}.",
        ],
        parts,
        {
            mode: {name: {str(n): times._asdict() for n, times in points.items()} for name, points in of_mode.items()}
            for mode, of_mode in predicted.items()
        },
    )


def _figure(
    mode: str,
    label: str,
    measured: Mapping[int, Interval],
    *,
    by_algorithm: Mapping[str, Mapping[int, Interval]],
    seconds: bool = False,
) -> Figure:
    title = f"{mode} scaling on a cluster: {label}"
    predicted = [Series(f"{name}, predicted", points, predicted=True) for name, points in by_algorithm.items()]
    return Figure(title, over_ranks(title, label, [Series("measured", measured), *predicted], seconds=seconds))


def _cluster_points(
    mode: str, algorithm: str, plan: ScalingPlan, *, fits: Fits, flags: ClusterFlags
) -> dict[int, Interval]:
    points = {}
    for ranks in powers_of_two(flags.ranks_per_node, LARGEST_CLUSTER):
        rows = flags.batch / ranks if mode == "strong" else float(plan.rows)
        if rows < 1:
            continue
        computation = computation_of_rows(rows, fits.computation)
        times = []
        for spread, local, link in fits.with_bounds(computation.size):
            hops = _hop(flags.node, local), _hop(flags.link, link or local)
            cluster = Cluster(flags.ranks_per_node, *hops)
            times.append(predict_cluster_step(computation.scaled(spread), cluster, algorithm, ranks=ranks))
        points[ranks] = Interval(*times)
    return points


def _hop(described: Hop | None, measured: AlphaBeta) -> Hop:
    """Return a message's cost: as described, or from an all-reduce among two ranks: two messages of half a tensor."""
    return described or Hop(measured.alpha / 2, measured.beta)


def _describe_hop(described: Hop | None, measured: AlphaBeta, source: str) -> str:
    hop = _hop(described, measured)
    source = "as given" if described else source
    return f"{format_seconds(hop.alpha)} per message and {format_bandwidth(hop.beta)} ({source})"
