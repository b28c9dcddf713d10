"""The section of the scaling page that extrapolates to a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...common.charts import Series
from ...common.formats import format_bandwidth
from ...distributed.topology import powers_of_two
from ..alpha_beta import AlphaBeta
from ..charts import format_seconds, over_ranks
from ..page import Figure, Section, Table
from ..rounds import Interval
from .cluster import ALGORITHMS, Cluster, Hop, computation_of_rows, predict_cluster_step
from .measure import MODES, ScalingPlan
from .predict import Fits, over

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
