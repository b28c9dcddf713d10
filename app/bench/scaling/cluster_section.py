"""The section about a cluster of the scaling page: steps of up to 1,024 ranks, predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...common.charts import Series
from ...common.formats import format_bandwidth
from ...distributed.world import powers_of_two
from ..alpha_beta import AlphaBeta
from ..charts import format_seconds, over_ranks
from ..page import Figure, Section, Table
from ..rounds import Interval
from .cluster import (
    ALGORITHMS,
    Cluster,
    LinearComputation,
    expected_maximum,
    fit_rows,
    predict_cluster_step,
    straggling,
)
from .configuration import MODES, Hop, ScalingPlan
from .predict import Fits, over

LARGEST_CLUSTER = 1024  # ranks


class Scenario(NamedTuple):
    """One set of inputs: as expected, or at a bound."""

    spread: float  # the time of computations, relative to what is expected
    within: Hop  # a message between two ranks of a node
    between: Hop  # a message between two nodes


@dataclass(frozen=True)
class ClusterInput:
    """What a cluster is predicted from."""

    computation: LinearComputation
    scenarios: Sequence[Scenario]  # as expected, then with everything as fast and as slow as it may be
    rows: int  # of each rank in weak scaling
    about: Sequence[str]  # sentences that say where this comes from
    measured: Mapping[int, Interval] = field(default_factory=dict)  # steps of weak scaling, if there are any


@dataclass(frozen=True)
class ClusterFlags:
    """The cluster that the user has described."""

    ranks_per_node: int
    link: Hop | None  # between nodes; None: as measured
    node: Hop | None  # between the ranks of a node
    batch: int  # rows of a step in strong scaling
    variation: float = 0.0  # of the ranks' computation: see `straggling`


def cluster_section(source: ClusterInput, flags: ClusterFlags) -> Section:
    parts: list[Table | Figure] = []
    data = {}
    for mode in MODES:
        steps = {name: predicted_steps(mode, name, source, flags=flags) for name in ALGORITHMS}
        times = {name: {n: _interval(of_n) for n, of_n in of_name.items()} for name, of_name in steps.items()}
        strong = mode == "strong"
        ratios = {name: ratios_over_one_rank(of_name) for name, of_name in steps.items()}
        rows = [
            [f"{n:,}", *(format_seconds(times[name][n].middle) for name in ALGORITHMS)]
            + [f"{ratios[name][n].middle / (n if strong else 1):.0%}" for name in ALGORITHMS]
            for n in times["ring"]
        ]
        per = f"{flags.batch} rows per step" if strong else f"{source.rows} rows per rank"
        header = ["ranks", *ALGORITHMS, *(f"efficiency, {name}" for name in ALGORITHMS)]
        parts.append(Table(f"{mode} scaling, {per}: time of a step", header, rows))
        # Strong scaling on a cluster has more rows than the measured steps.
        points = {} if strong else source.measured
        parts.append(_figure(mode, "time of a step", points, by_algorithm=times, seconds=True))
        points = {n: over(points[1].middle, of_n) for n, of_n in points.items()} if 1 in points else {}
        parts.append(_figure(mode, "speedup over one rank" if strong else "efficiency", points, by_algorithm=ratios))
        data[mode] = {name: {str(n): of_n._asdict() for n, of_n in of_name.items()} for name, of_name in times.items()}
    about = " ".join([*source.about, _describe_variation(flags.variation)])
    return Section("cluster", "A cluster", [about], parts, data)


def measured_input(
    plan: ScalingPlan, fits: Fits, flags: ClusterFlags, *, measured: Mapping[int, Interval]
) -> ClusterInput:
    """Return the input from measurements. `measured`: steps of weak scaling of ranks that have a core each."""
    computation = fit_rows(fits.by_rows())
    scenarios = [
        Scenario(spread, flags.node or _hop(local), flags.link or _hop(link or local))
        for spread, local, link, _ in fits.with_bounds(sum(computation.sizes))
    ]
    _, within, between = scenarios[0]
    assumed = "not measured: assumed to be as fast as within this machine"
    over_link = "measured over the unshaped link" if fits.link else assumed
    about = (
        f"Predicted, not measured: nodes of {flags.ranks_per_node} ranks, each with a core of its own. Within a node: "
        f"{describe_hop(within)} ({'as given' if flags.node else 'measured on this machine'}). Between nodes, whose "
        f"ranks share one link: {describe_hop(between)} ({'as given' if flags.link else over_link})."
    )
    return ClusterInput(computation, scenarios, plan.rows, [about], measured)


def describe_hop(hop: Hop) -> str:
    return f"{format_seconds(hop.alpha)} per message and {format_bandwidth(hop.beta)}"


def _hop(measured: AlphaBeta) -> Hop:
    """Return a message's cost from an all-reduce among two ranks, which is two messages of half a tensor."""
    return Hop(measured.alpha / 2, measured.beta)


def _describe_variation(variation: float) -> str:
    if not variation:
        return "All ranks compute equally fast (--straggler_percent)."
    slowest = straggling(LARGEST_CLUSTER, variation) - 1
    return (
        f"The ranks' computation varies by {variation:.1%} (standard deviation), and a step lasts as long as the "
        f"slowest rank's: {slowest:.1%} longer with {LARGEST_CLUSTER:,} ranks, {expected_maximum(LARGEST_CLUSTER):.2f} "
        "standard deviations."
    )


def ratios_over_one_rank(steps: Mapping[int, Sequence[float]]) -> dict[int, Interval]:
    """Return T(1) / T(N), both in the same scenario, from the seconds of `predicted_steps`."""
    return {
        n: _interval([base / seconds for base, seconds in zip(steps[1], of_n, strict=True)])
        for n, of_n in steps.items()
    }


def _interval(values: Sequence[float]) -> Interval:
    """Return the first value, which is the expected one, and the range of all."""
    return Interval(values[0], min(values), max(values))


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


def predicted_steps(mode: str, algorithm: str, source: ClusterInput, *, flags: ClusterFlags) -> dict[int, list[float]]:
    """Return the predicted seconds of a step in each scenario, by the number of ranks."""
    steps = {}
    for ranks in powers_of_two(flags.ranks_per_node, LARGEST_CLUSTER):
        rows = flags.batch / ranks if mode == "strong" else float(source.rows)
        if rows < 1:
            continue
        computation = source.computation.of_rows(rows).scaled(straggling(ranks, flags.variation))
        steps[ranks] = [
            predict_cluster_step(
                computation.scaled(spread), Cluster(flags.ranks_per_node, within, between), algorithm, ranks=ranks
            )
            for spread, within, between in source.scenarios
        ]
    return steps
