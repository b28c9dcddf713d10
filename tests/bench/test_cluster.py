"""Steps on a cluster, predicted by hand, and the claim of the paper that they answer."""

from __future__ import annotations

import json
import sys

import pytest

from app.bench import scaling
from app.bench.scaling import bucket_sizes, predict_step, ring_all_reduce
from app.program import run_program

MIB = 2**20


def test_a_ring_by_hand():
    """16 ranks: 15 messages of a sixteenth to add, and as many to distribute the sums."""
    assert ring_all_reduce(16, 1000, alpha=10, beta=0.1) == pytest.approx(2 * 15 * 10 + 2 * 15 / 16 * 1000 * 0.1)
    assert ring_all_reduce(1, 1000, alpha=10, beta=0.1) == 0, "one rank exchanges nothing"


def test_buckets_are_filled_up_to_their_limits():
    assert bucket_sizes(250) == [1000]
    assert bucket_sizes(MIB / 4) == [MIB]
    assert bucket_sizes(30 * MIB / 4) == [MIB, 25 * MIB, 4 * MIB]


def test_buckets_wait_for_each_other_by_hand():
    """16 ranks: 30 messages for each bucket; the last one waits until the one before is exchanged."""
    last = 240_000_000 - MIB - 9 * 25 * MIB
    assert bucket_sizes(60e6) == [MIB, *[25 * MIB] * 9, last]
    ready = 0.25 - last / 240_000_000 * 0.25 * 2 / 3
    exchanges = 2 * 30 * 10e-6 + 2 * 15 / 16 * (25 * MIB + last) * 8 / 100e9
    assert predict_step(0.25, 60e6, 16, alpha=10e-6, beta=8e-11) == pytest.approx(ready + exchanges)


def test_60_million_parameters_scale_to_256_gpus_over_100_gbit_but_not_over_10(monkeypatch, tmp_path, capsys):
    """The claim of Li et al. 2020: near-linear with 256 GPUs. docs/scaling.md has these figures."""
    efficiency = {}
    for gbit in (100, 25, 10):
        folder = tmp_path / str(gbit)
        flags = ["--step_ms", "250", "--parameters", "60e6", "--link_gbit", str(gbit), "--output_dir", str(folder)]
        monkeypatch.setattr(sys, "argv", ["scaling", *flags])
        assert run_program(scaling.main) == 0
        steps = json.loads((folder / "scaling.json").read_text())["sections"]["cluster"]["step"]
        assert list(map(int, steps)) == [2**n for n in range(11)]
        efficiency[gbit] = round(0.25 / steps["256"], 2)
    assert efficiency == {100: 0.95, 25: 0.82, 10: 0.47}
    assert "take 10 µs each, and a second for 12.5 GB" in " ".join(capsys.readouterr().out.split())
