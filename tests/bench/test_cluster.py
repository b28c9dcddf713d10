"""All-reduces on a cluster, the step that it is predicted from, stragglers, and the prediction by hand."""

from __future__ import annotations

import json
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.bench import scaling
from app.bench.cluster import (
    ALGORITHMS,
    Cluster,
    Hop,
    Step,
    bucket_sizes,
    expected_maximum,
    powers_of_two,
    predict_step,
    ring_all_reduce,
    tree_all_reduce,
)
from app.program import run_program

MIB = 2**20
WITHIN, BETWEEN = Hop(1.0, 0.01), Hop(10.0, 0.1)
CLUSTER = Cluster(8, WITHIN, BETWEEN)
SIZE = 1000


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_rank_exchanges_nothing(algorithm):
    assert CLUSTER.all_reduce(algorithm, 1, SIZE) == 0


def test_within_a_node_only_its_own_messages_count():
    assert CLUSTER.all_reduce("ring", 8, SIZE) == pytest.approx(ring_all_reduce(8, SIZE, WITHIN))
    assert CLUSTER.all_reduce("hierarchical", 8, SIZE) == pytest.approx(ring_all_reduce(8, SIZE, WITHIN))
    assert CLUSTER.all_reduce("tree", 8, SIZE) == pytest.approx(tree_all_reduce(8, SIZE, WITHIN))


def test_across_nodes_by_hand():
    """16 ranks on 2 nodes."""
    assert CLUSTER.all_reduce("ring", 16, SIZE) == pytest.approx(2 * 15 * 10 + 2 * 15 / 16 * SIZE * 0.1)
    assert CLUSTER.all_reduce("tree", 16, SIZE) == pytest.approx(2 * 3 * 1 + 2 * 1 * 10 + 2 * SIZE * 0.1)
    within = 2 * (7 * 1 + 7 / 8 * SIZE * 0.01)
    between = 2 * 10 + 2 * 1 / 2 * SIZE * 0.1
    assert CLUSTER.all_reduce("hierarchical", 16, SIZE) == pytest.approx(within + between)


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


def test_buckets_are_filled_up_to_their_limits():
    assert bucket_sizes(250) == [1000]
    assert bucket_sizes(MIB / 4) == [MIB]
    assert bucket_sizes(30 * MIB / 4) == [MIB, 25 * MIB, 4 * MIB]


def test_the_slowest_of_several_ranks_in_closed_form():
    """Order statistics of the normal distribution, of which the first five have a closed form."""
    assert expected_maximum(1) == pytest.approx(0, abs=1e-9)
    assert expected_maximum(2) == pytest.approx(1 / math.sqrt(math.pi))
    assert expected_maximum(4) == pytest.approx(3 / math.sqrt(math.pi) * (0.5 + math.asin(1 / 3) / math.pi))
    assert expected_maximum(1000) == pytest.approx(3.24144, abs=1e-5), "Tippett's table"


def test_steps_by_hand():
    """8 rows take 2 s; two ranks exchange one bucket in two messages of 0.5 s."""
    step = Step(2.0, rows=8, parameters=25, variation=0.2)
    cluster = Cluster(2, Hop(0.5, 0.0), Hop(1.0, 0.0))
    one, two = (predict_step(step, cluster, rows=8, ranks=n) for n in (1, 2))
    assert one == dict.fromkeys(ALGORITHMS, pytest.approx(2.0))
    assert two["ring"] == pytest.approx(2.0 * (1 + 0.2 / math.sqrt(math.pi)) + 2 * 0.5)
    assert predict_step(step, cluster, rows=16, ranks=1)["ring"] == pytest.approx(4.0)


def test_buckets_wait_for_each_other_by_hand():
    """16 ranks on two nodes: 30 messages over the link; the last bucket waits until the one before is exchanged."""
    cluster = Cluster(8, Hop(5e-6, 8 / 256e9), Hop(10e-6, 8 / 100e9))
    last = 240_000_000 - MIB - 9 * 25 * MIB
    assert bucket_sizes(60e6) == [MIB, *[25 * MIB] * 9, last]
    ready = 0.25 - last / 240_000_000 * 0.25 * 2 / 3
    exchanges = 2 * 30 * 10e-6 + 2 * 15 / 16 * (25 * MIB + last) * 8 / 100e9
    steps = predict_step(Step(0.25, rows=8, parameters=60e6), cluster, rows=8, ranks=16)
    assert steps["ring"] == pytest.approx(ready + exchanges)


def predict(monkeypatch, folder, *flags):
    monkeypatch.setattr(sys, "argv", ["scaling", "--parameters", "60e6", "--output_dir", str(folder), *flags])
    assert run_program(scaling.main) == 0
    return json.loads((folder / "scaling.json").read_text())["sections"]["cluster"]["weak"]


def test_60_million_parameters_scale_to_256_gpus_over_100_gbit_but_not_over_10(monkeypatch, tmp_path, capsys):
    """The claim of Li et al. 2020: near-linear with 256 GPUs."""
    fast = predict(monkeypatch, tmp_path / "fast", "--step_ms", "250", "--link_gbit", "100")
    slow = predict(monkeypatch, tmp_path / "slow", "--step_ms", "250", "--link_gbit", "10")
    straggling = predict(monkeypatch, tmp_path / "late", "--step_ms", "250", "--straggler_percent", "3")
    for algorithm in ALGORITHMS:
        assert 0.25 / fast[algorithm]["256"] > 0.94
        assert 0.25 / slow[algorithm]["256"] < 0.55
        assert 0.25 / straggling[algorithm]["256"] < 0.25 / fast[algorithm]["256"] - 0.05
    assert "<svg" in (tmp_path / "fast" / "scaling.html").read_text()
    assert "10 µs per message and 12.5 GB/s" in " ".join(capsys.readouterr().out.split())


def test_nodes_of_a_cluster_are_complete(monkeypatch, tmp_path):
    found = predict(monkeypatch, tmp_path / "out", "--step_ms", "250", "--ranks_per_node", "6")
    assert list(map(int, found["ring"])) == [1, 2, 4, 6, 12, 24, 48, 96, 192, 384, 768]


def test_numbers_of_ranks_fill_the_nodes():
    assert powers_of_two(6, 1024) == [1, 2, 4, 6, 12, 24, 48, 96, 192, 384, 768]
    for inside in (1, 8, 4096):
        assert powers_of_two(inside, 1024) == [2**n for n in range(11)]
