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
    StepProfile,
    bucket_sizes,
    expected_maximum,
    from_step_time,
    predict_step,
    read_profile,
    ring_all_reduce,
    tree_all_reduce,
    variation_among_ranks,
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
    """8 rows take 2 s, then 0.5 s for the update; two ranks exchange one bucket in two messages of 0.5 s."""
    step = StepProfile(8, forward=1.0, backward=1.0, update=0.5, variation=0.2, source="")
    cluster = Cluster(2, Hop(0.5, 0.0), Hop(1.0, 0.0))
    one, two = (predict_step(step, 25, rows=8, cluster=cluster, ranks=n) for n in (1, 2))
    assert one == dict.fromkeys(ALGORITHMS, pytest.approx(2.5))
    assert two["ring"] == pytest.approx(2.5 * (1 + 0.2 / math.sqrt(math.pi)) + 2 * 0.5)
    assert predict_step(step, 25, rows=16, cluster=cluster, ranks=1)["ring"] == pytest.approx(4.5)


def test_buckets_wait_for_each_other_by_hand():
    """16 ranks on two nodes: 30 messages over the link; the last bucket waits until the one before is exchanged."""
    cluster = Cluster(8, Hop(5e-6, 8 / 256e9), Hop(10e-6, 8 / 100e9))
    last = 240_000_000 - MIB - 9 * 25 * MIB
    assert bucket_sizes(60e6) == [MIB, *[25 * MIB] * 9, last]
    ready = 0.25 - last / 240_000_000 * 0.25 * 2 / 3
    exchanges = 2 * 30 * 10e-6 + 2 * 15 / 16 * (25 * MIB + last) * 8 / 100e9
    steps = predict_step(from_step_time(250, rows=8), 60e6, rows=8, cluster=cluster, ranks=16)
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


def step(forward: float) -> dict[str, float]:
    parts = {"data wait": 1.0, "forward": forward, "backward": 20.0, "exposed communication": 7.0}
    return parts | {"optimizer": 4.0, "other": 1.0, "step": 33.0 + forward, "communication": 9.0}


def write_run(folder, ranks):
    (folder / "profile").mkdir(parents=True)
    settings = {"path": "ddp_loop", "world_size": 2, "train_batch_size": 64}
    (folder / "settings.json").write_text(json.dumps(settings))
    (folder / "profile" / "summary.json").write_text(json.dumps({"steps": [5, 6], "unit": "ms", "ranks": ranks}))
    return folder


def test_a_profile_without_what_ranks_wait_for_each_other(monkeypatch, tmp_path, capsys):
    run = write_run(tmp_path / "run", [[step(8.0), step(10.0)], [step(12.0), step(10.0)]])
    profile = read_profile(run)
    assert profile.rows == 32
    assert (profile.forward, profile.backward, profile.update) == pytest.approx((0.011, 0.020, 0.005))
    # The first step takes 34 and 38 ms: variance 8 and mean 36. The second one takes equally long on both ranks.
    assert profile.variation == pytest.approx((8 / 36**2 / 2) ** 0.5)
    found = predict(monkeypatch, tmp_path / "out", "--profile", str(run))
    assert found["ring"]["1"] == pytest.approx(0.036)
    assert "varies by 5.6%" in " ".join(capsys.readouterr().out.split())


def test_steps_of_different_length_are_no_stragglers():
    assert variation_among_ranks([[1.0, 2.0], [1.0, 2.0]]) == 0
    assert variation_among_ranks([[1.0, 2.0]]) == 0


@pytest.mark.parametrize("ranks", [[], [[]], [[{"forward": 1.0}]], "text", [[step(8.0)], []]])
def test_a_damaged_profile_is_one_line(ranks, monkeypatch, tmp_path, capsys):
    run = write_run(tmp_path / "run", ranks)
    monkeypatch.setattr(sys, "argv", ["scaling", "--profile", str(run), "--parameters", "6e7"])
    monkeypatch.chdir(tmp_path)
    assert run_program(scaling.main) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "it has to be the folder of a run that was started with --profile N" in err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
