"""All-reduces on a cluster, and the computation of other numbers of rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.bench.alpha_beta import ring_all_reduce, tree_all_reduce
from app.bench.scaling.cluster import ALGORITHMS, Cluster, Hop, computation_of_rows, predict_cluster_step
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

    measured = {rows: of(rows) for rows in (4, 8, 16)}
    for rows in (1, 2.5, 8, 1024):
        found, expected = computation_of_rows(rows, measured), of(rows)
        assert found.seconds == pytest.approx(expected.seconds)
        assert [size for size, _ in found.buckets] == [100, 200]
        assert [at for _, at in found.buckets] == pytest.approx([at for _, at in expected.buckets])


@given(first=st.floats(1e-4, 10), second=st.floats(1e-4, 10), rows=st.floats(1, 10**5))
def test_noise_makes_no_computation_free(first, second, rows):
    """On a busy machine, half the rows can take longer, or less than half the time."""
    measured = {2: Computation(first, ((100, first),)), 4: Computation(second, ((100, second),))}
    found = computation_of_rows(rows, measured)
    assert found.seconds > 0
    assert found.seconds <= computation_of_rows(2 * rows, measured).seconds


def test_a_step_on_one_rank_is_its_computation():
    computation = Computation(3.5, ((100, 2.0), (200, 3.0)))
    for algorithm in ALGORITHMS:
        assert predict_cluster_step(computation, CLUSTER, algorithm, ranks=1) == pytest.approx(3.5)
