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
from .predict import Fits, at_bound, over

LARGEST_CLUSTER = 1024  # ranks


@dataclass(frozen=True)
class ClusterFlags:
    """The cluster that the user has described.

    Attributes:
        link: Gbit/s and microseconds between nodes; None: as measured.
        node: the same between the ranks of a node.
        batch: rows of a step in strong scaling.
    """

    ranks_per_node: int
    link: tuple[float | None, float | None]
    node: tuple[float | None, float | None]
    batch: int


def cluster_section(plan: ScalingPlan, fits: Fits, flags: ClusterFlags, *, measured: Mapping[int, Interval]) -> Section:
    """Return the section.

    Args:
        measured: steps of weak scaling by the number of ranks, where each has a core of its own.
    """
    predicted = {
        mode: {name: _cluster_points(mode, name, plan, fits=fits, flags=flags) for name in ALGORITHMS} for mode in MODES
    }
    within = _describe_hop(flags.node, fits.local, "measured on this machine")
    assumed = "not measured: assumed to be as fast as within this machine"
    over_link = "measured over the unshaped link" if fits.link else assumed
    between = _describe_hop(flags.link, fits.link or fits.local, over_link)
    parts: list[Table | Figure] = []
    for mode in MODES:
        of_mode = predicted[mode]
        base = of_mode["ring"][1].middle
        rows = [
            [f"{n:,}", *(format_seconds(of_mode[name][n].middle) for name in ALGORITHMS)]
            + [f"{base / of_mode[name][n].middle / (n if mode == 'strong' else 1):.0%}" for name in ALGORITHMS]
            for n in of_mode["ring"]
        ]
        per = f"{flags.batch} rows per step" if mode == "strong" else f"{plan.rows} rows per rank"
        header = ["ranks", *ALGORITHMS, *(f"efficiency, {name}" for name in ALGORITHMS)]
        parts.append(Table(f"{mode} scaling, {per}: time of a step", header, rows))
        # Strong scaling on a cluster has more rows than what is measured.
        points = dict(measured) if mode == "weak" else {}
        title = f"{mode} scaling on a cluster: time of a step"
        parts.append(Figure(title, over_ranks(title, "time of a step", _series(points, of_mode), seconds=True)))
        label = "speedup over one rank" if mode == "strong" else "efficiency"
        title = f"{mode} scaling on a cluster: {label}"
        scaled = {name: {n: over(base, one) for n, one in of_mode[name].items()} for name in ALGORITHMS}
        points = {n: over(points[1].middle, one) for n, one in points.items()} if 1 in points else {}
        parts.append(Figure(title, over_ranks(title, label, _series(points, scaled))))
    return Section(
        "cluster",
        "A cluster",
        [
            f"Predicted, not measured: nodes of {flags.ranks_per_node} ranks, each with a core of its own. Within a "
            f"node: {within}. Between nodes, whose ranks share one link: {between}.",
        ],
        parts,
        {
            mode: {name: {str(n): one._asdict() for n, one in values.items()} for name, values in of_mode.items()}
            for mode, of_mode in predicted.items()
        },
    )


def _series(measured: Mapping[int, Interval], by_algorithm: Mapping[str, Mapping[int, Interval]]) -> list[Series]:
    predicted = [Series(f"{name}, predicted", points, predicted=True) for name, points in by_algorithm.items()]
    return [Series("measured", measured), *predicted]


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
        for end, spread in ((None, 1.0), (0, fits.spread[0]), (1, fits.spread[1])):
            within = _hop(flags.node, at_bound(fits.local, computation.size, end))
            between = _hop(flags.link, at_bound(fits.link or fits.local, computation.size, end))
            cluster = Cluster(flags.ranks_per_node, within, between)
            times.append(predict_cluster_step(computation.scaled(spread), cluster, algorithm, ranks=ranks))
        points[ranks] = Interval(*times)
    return points


def _hop(given: tuple[float | None, float | None], measured: AlphaBeta) -> Hop:
    """Return a message's cost: as given, or from an all-reduce among two ranks: two messages of half a tensor."""
    gbit, microseconds = given
    if gbit is None or microseconds is None:
        return Hop(measured.alpha / 2, measured.beta)
    return Hop(microseconds / 1e6, 8 / (gbit * 1e9))


def _describe_hop(given: tuple[float | None, float | None], measured: AlphaBeta, source: str) -> str:
    hop = _hop(given, measured)
    source = source if given[0] is None else "as given"
    return f"{format_seconds(hop.alpha)} per message and {format_bandwidth(hop.beta)} ({source})"
