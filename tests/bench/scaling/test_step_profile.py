"""A cluster that is predicted from the time of a step or from a profile, without measurements on this machine."""

from __future__ import annotations

import json
import sys

import pytest

from app.bench.scaling import __main__ as scaling
from app.bench.scaling.cluster_section import ClusterFlags, cluster_section
from app.bench.scaling.configuration import LINK, NODE
from app.bench.scaling.step_profile import (
    as_linear,
    bucket_sizes,
    from_step_time,
    profile_input,
    read_profile,
    variation_among_ranks,
)
from app.program import run_program

MIB = 2**20


def test_buckets_are_filled_up_to_their_limits():
    assert bucket_sizes(1000) == [1000]
    assert bucket_sizes(MIB) == [MIB]
    assert bucket_sizes(30 * MIB) == [MIB, 25 * MIB, 4 * MIB]


def test_a_step_is_divided_into_passes_and_buckets():
    profile = from_step_time(300, rows=4)
    assert (profile.forward, profile.backward, profile.update) == pytest.approx((0.1, 0.2, 0.0))
    line = as_linear(profile, parameters=(MIB + 25 * MIB) // 4)
    four, eight = line.of_rows(4), line.of_rows(8)
    assert four.buckets == ((MIB, pytest.approx(0.1 + 0.2 / 26)), (25 * MIB, pytest.approx(0.3)))
    assert four.seconds == pytest.approx(0.3)
    assert eight.seconds == pytest.approx(0.6)


def test_times_by_hand():
    """16 ranks on two nodes: 30 messages over the link; the last bucket waits until the one before is exchanged."""
    source = profile_input(from_step_time(250, rows=8), 60_000_000, ClusterFlags(8, link=LINK, node=NODE, batch=1024))
    assert source.scenarios == [(1.0, (5e-6, 8 / 256e9), (10e-6, 8 / 100e9))]
    last = 240_000_000 - MIB - 9 * 25 * MIB
    assert source.computation.sizes == (MIB, *[25 * MIB] * 9, last)
    steps = cluster_section(source, ClusterFlags(8, LINK, NODE, batch=1024)).data["weak"]["ring"]
    ready = 0.25 - last / 240_000_000 * 0.25 * 2 / 3
    exchanges = 2 * 30 * 10e-6 + 2 * 15 / 16 * (25 * MIB + last) * 8 / 100e9
    assert steps["16"]["middle"] == pytest.approx(ready + exchanges)


def predict(monkeypatch, folder, *flags):
    command = ["scaling", "--parameters", "60e6", "--output_dir", str(folder), *flags]
    monkeypatch.setattr(sys, "argv", command)
    assert run_program(scaling.main) == 0
    return json.loads((folder / "scaling.json").read_text())["sections"]["cluster"]["weak"]


def test_60_million_parameters_scale_to_256_gpus_over_100_gbit_but_not_over_10(monkeypatch, tmp_path, capsys):
    """The claim of Li et al. 2020: near-linear with 256 GPUs."""
    fast = predict(monkeypatch, tmp_path / "fast", "--step_ms", "250", "--link_gbit", "100")
    slow = predict(monkeypatch, tmp_path / "slow", "--step_ms", "250", "--link_gbit", "10")
    straggling = predict(
        monkeypatch, tmp_path / "late", "--step_ms", "250", "--link_gbit", "100", "--straggler_percent", "3"
    )
    for algorithm in ("ring", "tree", "hierarchical"):
        assert 0.25 / fast[algorithm]["256"]["middle"] > 0.94
        assert 0.25 / slow[algorithm]["256"]["middle"] < 0.55
        assert 0.25 / straggling[algorithm]["256"]["middle"] < 0.25 / fast[algorithm]["256"]["middle"] - 0.05
    out = capsys.readouterr().out
    assert "10 µs per message and 12.5 GB/s. The flags" in " ".join(out.split())
    assert "<svg" in (tmp_path / "fast" / "scaling.html").read_text()


def write_run(folder, ranks, **settings):
    (folder / "profile").mkdir(parents=True)
    content = {"path": "ddp_loop", "world_size": len(ranks), "csv": "x.csv", "seed": 42} | settings
    (folder / "settings.json").write_text(json.dumps(content))
    (folder / "profile" / "summary.json").write_text(json.dumps({"steps": [5, 6], "unit": "ms", "ranks": ranks}))
    return folder


def step(forward: float) -> dict[str, float]:
    parts = {"data wait": 1.0, "forward": forward, "backward": 20.0, "exposed communication": 7.0}
    return parts | {"optimizer": 4.0, "other": 1.0, "step": 33.0 + forward, "communication": 9.0}


def test_a_profile_without_what_ranks_wait_for_each_other(monkeypatch, tmp_path, capsys):
    run = write_run(tmp_path / "run", [[step(8.0), step(10.0)], [step(12.0), step(10.0)]], train_batch_size=64)
    profile = read_profile(run)
    assert profile.rows == 32
    assert (profile.forward, profile.backward, profile.update) == pytest.approx((0.011, 0.020, 0.005))
    # The first step takes 34 and 38 ms: variance 8 and mean 36. The second one takes equally long on both ranks.
    assert profile.variation == pytest.approx((8 / 36**2 / 2) ** 0.5)
    found = predict(monkeypatch, tmp_path / "out", "--profile", str(run))
    assert found["ring"]["1"]["middle"] == pytest.approx(0.036)
    assert "varies by 5.6%" in " ".join(capsys.readouterr().out.split())
    line = as_linear(profile, 1000)
    assert line.of_rows(64).seconds == pytest.approx(2 * 0.031 + 0.005), "only the update does not depend on the rows"


def test_steps_of_different_length_are_no_stragglers():
    assert variation_among_ranks([[1.0, 2.0], [1.0, 2.0]]) == 0
    assert variation_among_ranks([[1.0, 2.0]]) == 0


@pytest.mark.parametrize(
    "ranks",
    [[], [[]], [[{"forward": 1.0}]], "text", [[step(-30.0)]], [[step(float("nan"))]], [[step(8.0)], []]],
    ids=["no ranks", "no steps", "keys missing", "text", "negative", "nan", "ranks with unequal steps"],
)
def test_a_damaged_profile_is_one_line(ranks, monkeypatch, tmp_path, capsys):
    run = write_run(tmp_path / "run", ranks, world_size=1, train_batch_size=32)
    monkeypatch.setattr(sys, "argv", ["scaling", "--profile", str(run), "--parameters", "6e7"])
    monkeypatch.chdir(tmp_path)
    assert run_program(scaling.main) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "summary.json: damaged" in err
