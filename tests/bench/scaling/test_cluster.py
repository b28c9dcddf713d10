"""All-reduces on a cluster, the computation of other numbers of rows, stragglers, and the section of the report."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.bench.alpha_beta import ring_all_reduce, tree_all_reduce
from app.bench.scaling.cluster import (
    ALGORITHMS,
    Cluster,
    LinearComputation,
    expected_maximum,
    fit_rows,
    predict_cluster_step,
    straggling,
)
from app.bench.scaling.cluster_section import (
    ClusterFlags,
    ClusterInput,
    Scenario,
    cluster_section,
    predicted_steps,
    ratios_over_one_rank,
)
from app.bench.scaling.configuration import MODES, Hop
from app.bench.scaling.predict import Computation

WITHIN, BETWEEN = Hop(1.0, 0.01), Hop(10.0, 0.1)
CLUSTER = Cluster(8, WITHIN, BETWEEN)
SIZE = 1000


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_rank_exchanges_nothing(algorithm):
    assert CLUSTER.all_reduce(algorithm, 1, SIZE) == 0


def test_within_a_node_only_its_own_messages_count():
    assert CLUSTER.all_reduce("ring", 8, SIZE) == pytest.approx(ring_all_reduce(8, SIZE, alpha=1.0, beta=0.01))
    assert CLUSTER.all_reduce("hierarchical", 8, SIZE) == pytest.approx(ring_all_reduce(8, SIZE, alpha=1.0, beta=0.01))
    assert CLUSTER.all_reduce("tree", 8, SIZE) == pytest.approx(tree_all_reduce(8, SIZE, alpha=1.0, beta=0.01))


def test_across_nodes_by_hand():
    """16 ranks on 2 nodes."""
    assert CLUSTER.all_reduce("ring", 16, SIZE) == pytest.approx(2 * 15 * 10 + 2 * 15 / 16 * SIZE * 0.1)
    assert CLUSTER.all_reduce("tree", 16, SIZE) == pytest.approx(2 * 3 * 1 + 2 * 1 * 10 + 2 * SIZE * 0.1)
    within = 2 * (7 * 1 + 7 / 8 * SIZE * 0.01)
    between = 2 * 10 + 2 * 1 / 2 * SIZE * 0.1
    assert CLUSTER.all_reduce("hierarchical", 16, SIZE) == pytest.approx(within + between)


def test_equal_hops_make_the_ring_independent_of_nodes():
    same = Cluster(8, WITHIN, WITHIN)
    assert same.all_reduce("ring", 256, SIZE) == pytest.approx(ring_all_reduce(256, SIZE, alpha=1.0, beta=0.01))


@given(
    algorithm=st.sampled_from(ALGORITHMS),
    power=st.integers(0, 11),
    size=st.integers(1, 10**9),
    alpha=st.floats(1e-7, 1e-2),
    beta=st.floats(1e-12, 1e-7),
    worse=st.floats(1, 100),
)
def test_more_ranks_never_reduce_faster(algorithm, power, size, alpha, beta, worse):
    cluster = Cluster(8, Hop(alpha, beta), Hop(alpha * worse, beta * worse))
    seconds = cluster.all_reduce(algorithm, 2**power, size)
    assert cluster.all_reduce(algorithm, 2 ** (power + 1), size) >= seconds * 0.999


def test_with_many_ranks_a_tree_has_less_latency_than_a_ring():
    assert CLUSTER.all_reduce("tree", 1024, 4) < CLUSTER.all_reduce("hierarchical", 1024, 4)
    assert CLUSTER.all_reduce("hierarchical", 1024, 4) < CLUSTER.all_reduce("ring", 1024, 4)


def test_a_straight_line_through_the_measured_rows_is_recovered():
    def of(rows: float) -> Computation:
        return Computation(0.5 + 0.25 * rows, ((100, 0.1 * rows), (200, 0.2 + 0.2 * rows)))

    line = fit_rows({rows: of(rows) for rows in (4, 8, 16)})
    for rows in (1, 2.5, 8, 1024):
        found, expected = line.of_rows(rows), of(rows)
        assert found.seconds == pytest.approx(expected.seconds)
        assert [size for size, _ in found.buckets] == [100, 200]
        assert [at for _, at in found.buckets] == pytest.approx([at for _, at in expected.buckets])


@st.composite
def noisy_computations(draw):
    """Computations of 2 to 4 numbers of rows whose times have nothing to do with each other, as on a busy machine."""
    measured = {}
    for rows in draw(st.lists(st.integers(1, 64), min_size=2, max_size=4, unique=True)):
        first, second, update = (draw(st.floats(1e-4, 10)) for _ in range(3))
        measured[rows] = Computation(first + second + update, ((100, first), (200, first + second)))
    return measured


@given(measured=noisy_computations())
def test_no_fit_has_a_negative_constant_or_slope(measured):
    line = fit_rows(measured)
    assert min(*line.constant, *line.per_row) >= 0
    for rows in (1, 1024):
        found = line.of_rows(rows)
        assert 0 <= found.buckets[0][1] <= found.buckets[1][1] <= found.seconds
        assert found.seconds > 0


@given(measured=noisy_computations(), variation=st.floats(0, 0.5), slow=st.floats(1, 2))
def test_no_predicted_efficiency_exceeds_100_percent(measured, variation, slow):
    """A line with a negative constant, or lines of two buckets that cross, could make T(1) more than N times T(N)."""
    scenarios = [
        Scenario(1.0, WITHIN, BETWEEN),
        Scenario(1 / slow, Hop(0, 0), Hop(0, 0)),
        Scenario(slow, *[BETWEEN] * 2),
    ]
    source = ClusterInput(fit_rows(measured), scenarios, 8, ["about"])
    flags = ClusterFlags(8, None, None, batch=1024, variation=variation)
    for mode, algorithm in product(MODES, ALGORITHMS):
        ratios = ratios_over_one_rank(predicted_steps(mode, algorithm, source, flags=flags))
        for ranks, ratio in ratios.items():
            assert ratio.high / (ranks if mode == "strong" else 1) <= 1 + 1e-9


def test_the_slowest_of_several_ranks_in_closed_form():
    """Order statistics of the normal distribution, of which the first five have a closed form."""
    assert expected_maximum(1) == pytest.approx(0, abs=1e-9)
    assert expected_maximum(2) == pytest.approx(1 / math.sqrt(math.pi))
    assert expected_maximum(3) == pytest.approx(1.5 / math.sqrt(math.pi))
    assert expected_maximum(4) == pytest.approx(3 / math.sqrt(math.pi) * (0.5 + math.asin(1 / 3) / math.pi))
    assert expected_maximum(1000) == pytest.approx(3.24144, abs=1e-5), "Tippett's table"
    assert straggling(2, 0.1) == pytest.approx(1.0564189584)
    assert straggling(1024, 0.0) == 1


def test_stragglers_lengthen_the_computation_and_not_the_exchange():
    computation = LinearComputation((100,), (0.0, 0.5), (0.25, 0.0))  # 2 s with 8 rows, then 0.5 s
    source = ClusterInput(computation, [Scenario(1.0, Hop(0.5, 0.0), Hop(1.0, 0.0))], 8, [])
    section = cluster_section(source, ClusterFlags(2, None, None, batch=16, variation=0.2))
    two = section.data["weak"]["ring"]["2"]
    assert two["middle"] == pytest.approx(2.5 * (1 + 0.2 / math.sqrt(math.pi)) + 2 * 0.5)
    assert section.data["weak"]["ring"]["1"]["middle"] == pytest.approx(2.5)
    # 16 rows per step: 4 s on one rank.
    assert section.data["strong"]["ring"]["1"]["middle"] == pytest.approx(4.5)
    assert "varies by 20.0%" in section.paragraphs[0]


def test_a_step_on_one_rank_is_its_computation():
    computation = Computation(3.5, ((100, 2.0), (200, 3.0)))
    for algorithm in ALGORITHMS:
        assert predict_cluster_step(computation, CLUSTER, algorithm, ranks=1) == pytest.approx(3.5)
