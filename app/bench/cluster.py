"""Predict training steps on a cluster of up to 1,024 ranks from the time of one rank's step without exchanges.

The backward pass makes buckets of gradients ready one after another, and each is exchanged while the next is computed
(Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2). Sending
a message of n bytes takes α + β n. docs/scaling.md#a-cluster explains the formulas and what they assume.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import pandas as pd
from scipy.integrate import quad
from scipy.stats import norm

from ..common.formats import format_bandwidth
from ..plan.memory import BUCKET_CAP
from ..plan.traffic import FIRST_BUCKET_CAP
from .core import Page, format_seconds

LARGEST_CLUSTER = 1024  # ranks
# The backward pass computes two matrix products for each one of the forward pass: Kaplan et al., "Scaling Laws for
# Neural Language Models", 2020, section 2.1.
FORWARD_SHARE = 1 / 3
GRADIENT_BYTES = 4  # of a parameter's gradient: fp32, also in mixed precision


class Hop(NamedTuple):
    """A message between two ranks: its latency in seconds, and the seconds per byte."""

    alpha: float
    beta: float

    def __str__(self) -> str:
        return f"{format_seconds(self.alpha)} per message and {format_bandwidth(self.beta)}"


def ring_all_gather(ranks: int, size: float, hop: Hop) -> float:
    """Return the seconds of a ring all-gather, or of a ring reduce-scatter, which sends the same.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19,
    2005, section 4.1. The time of the additions, γ there, is left out in all of these formulas.
    """
    return (ranks - 1) * (hop.alpha + size / ranks * hop.beta)


def ring_all_reduce(ranks: int, size: float, hop: Hop) -> float:
    """Return the seconds of a ring all-reduce: a reduce-scatter and an all-gather.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69, 2009.
    gloo's default, and NCCL's for large tensors.
    """
    return 2 * ring_all_gather(ranks, size, hop)


def tree_all_reduce(ranks: int, size: float, hop: Hop) -> float:
    """Return the seconds of an all-reduce along two binary trees: a pipelined reduction and a pipelined broadcast.

    Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
    Computing 35, 2009, without the terms of lower order for filling the pipeline. NCCL's algorithm since 2.4 if the
    latency of a ring is too long.
    """
    return 2 * math.ceil(math.log2(ranks)) * hop.alpha + 2 * size * hop.beta if ranks > 1 else 0.0


@dataclass(frozen=True)
class Cluster:
    """Nodes with the same number of ranks, each with a core or device of its own."""

    ranks_per_node: int
    within: Hop  # between two ranks of a node
    between: Hop  # between two nodes; the ranks of a node share this link

    def all_reduce(self, algorithm: str, ranks: int, size: float) -> float:
        """Return the seconds of an all-reduce. More than `ranks_per_node` ranks fill complete nodes."""
        inside, nodes = min(ranks, self.ranks_per_node), math.ceil(ranks / self.ranks_per_node)
        slower = Hop(*map(max, self.within, self.between)) if nodes > 1 else self.within
        if algorithm == "ring":
            # One ring through all nodes. Its messages travel at the same time: the slower hop determines each round.
            return ring_all_reduce(ranks, size, slower)
        if algorithm == "tree":
            # Two trees over the nodes, and two over the ranks of each. Latencies add up along the path.
            latency = tree_all_reduce(inside, 0, self.within) + tree_all_reduce(nodes, 0, self.between)
            return latency + tree_all_reduce(ranks, size, Hop(0, slower.beta))
        # Hierarchical: between the nodes, each rank of a node has its part of the tensor and its share of the link.
        return 2 * ring_all_gather(inside, size, self.within) + ring_all_reduce(nodes, size, self.between)


ALGORITHMS = ("ring", "tree", "hierarchical")


# ---- one rank's step -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One rank's step without exchanges, in seconds, and how much it varies among ranks."""

    seconds: float
    rows: int  # to which it is proportional
    parameters: float
    variation: float = 0.0  # coefficient of variation of the ranks' times in the same step

    @property
    def forward(self) -> float:
        return FORWARD_SHARE * self.seconds


def bucket_sizes(parameters: float) -> list[int]:
    """Return the bytes of DDP's buckets, if each of them is filled up to its limit."""
    total = int(GRADIENT_BYTES * parameters)
    ends = [0, *range(FIRST_BUCKET_CAP, total, BUCKET_CAP), total]
    return [end - start for start, end in pairwise(ends)]


@cache
def expected_maximum(count: int) -> float:
    """Return the mean of the largest of several independent values from the standard normal distribution.

    Source: Tippett, "On the extreme individuals and the range of samples taken from a normal population", Biometrika
    17, 1925. About √(2 ln(count)) for large counts.
    """
    value, _ = quad(lambda x: x * count * norm.pdf(x) * norm.cdf(x) ** (count - 1), -10, 10)
    return float(value)


# ---- the section of the report ---------------------------------------------------------------------------------------


def predict_step(step: Step, cluster: Cluster, *, rows: float, ranks: int) -> dict[str, float]:
    """Return the seconds of a step with this number of rows on each rank, with each algorithm."""
    # A step lasts as long as the slowest rank's computation.
    scale = (1 + step.variation * expected_maximum(ranks)) * rows / step.rows
    buckets = bucket_sizes(step.parameters)
    seconds = {}
    for name in ALGORITHMS:
        ready, end = scale * step.forward, 0.0
        for size in buckets:  # they are ready at a constant rate over the backward pass
            ready += scale * (step.seconds - step.forward) * size / sum(buckets)
            end = max(ready, end) + cluster.all_reduce(name, ranks, size)  # one exchange after another
        seconds[name] = end
    return seconds


def powers_of_two(ranks_per_node: int, most: int) -> list[int]:
    """Return numbers of ranks up to `most`: powers of two on one node, and then on powers of two of complete nodes."""
    powers = [1 << exponent for exponent in range(most.bit_length())]
    one_node = [ranks for ranks in powers if ranks < ranks_per_node]
    return one_node + [ranks_per_node * nodes for nodes in powers if ranks_per_node * nodes <= most]


def show_cluster(page: Page, step: Step, cluster: Cluster, *, batch: int) -> None:
    """Predict strong and weak scaling. `batch`: the rows that all ranks divide among them in strong scaling."""
    about = (
        f"Predicted, not measured: a step of {step.rows} rows takes {format_seconds(step.seconds)} without exchanges, "
        f"of which the forward pass takes {format_seconds(step.forward)}. Gradients of {step.parameters:,.0f} "
        f"parameters are exchanged in {len(bucket_sizes(step.parameters))} bucket(s). Within a node of "
        f"{cluster.ranks_per_node} ranks: {cluster.within}. Between nodes, whose ranks share one link: "
        f"{cluster.between}. The ranks' computation varies by {step.variation:.1%} (--straggler_percent)."
    )
    page.section("cluster", "A cluster", about)
    sizes = powers_of_two(cluster.ranks_per_node, LARGEST_CLUSTER)
    modes = {"strong": {n: batch / n for n in sizes if n <= batch}, "weak": dict.fromkeys(sizes, float(step.rows))}
    for mode, rows in modes.items():
        times = pd.DataFrame(
            {n: predict_step(step, cluster, rows=of_rank, ranks=n) for n, of_rank in rows.items()}
        ).T.rename_axis("ranks")
        speedup = times.iloc[0] / times
        efficiency = speedup.div(speedup.index.to_numpy(), axis=0) if mode == "strong" else speedup
        shown = times.map(format_seconds).join(efficiency.map("{:.0%}".format).add_prefix("efficiency, "))
        per = f"{batch} rows per step" if mode == "strong" else f"{step.rows} rows per rank"
        page.table(f"{mode} scaling, {per}: time of a step", shown)
        label = "speedup over one rank" if mode == "strong" else "efficiency"
        page.chart(f"{mode} scaling on a cluster: {label}", speedup, label, log=True)
        page.numbers[mode] = times.to_dict()
