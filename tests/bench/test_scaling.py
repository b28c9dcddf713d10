"""app.bench.scaling: its tables from synthetic times of jobs, and steps on a cluster, by hand."""

from __future__ import annotations

import json
import sys

import pandas as pd
import pytest

from app.bench import scaling
from app.bench.scaling import bucket_sizes, predict_step, ring_all_reduce
from app.program import run_program

MIB = 2**20


@pytest.fixture
def numbers(monkeypatch, tmp_path):
    """Run the command in an empty folder, and return the numbers of one of its sections."""

    def run(section, flags):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["scaling", *flags.split(), f"--output_dir={section}"])
        assert run_program(scaling.main) == 0
        return json.loads((tmp_path / section / "scaling.json").read_text())["sections"][section]

    return run


def test_speedups_of_known_times(numbers, monkeypatch, capsys):
    started = []

    def time_steps(program, flags, *, steps, ranks, threads, link):
        """Take 1 s per row of a rank, and 2 s more for an exchange."""
        started.append((flags[flags.index("--strategy") + 1], ranks, str(link), steps))
        seconds = 32 / ranks + 2.0 * (ranks > 1) + (link.delay_ms / 1000 if link else 0)
        return pd.Series({"seconds": steps * seconds})

    monkeypatch.setattr(scaling, "time_steps", time_steps)
    flags = "--ranks 1 2 4 --use_cpu --rounds 2 --steps 3 --model tiny --links 1:500 --strategies zero3"
    seconds = numbers("measured", flags)["seconds"]
    # 32 rows on one rank; 16 and an exchange on two; 8 and an exchange on four.
    assert seconds["ddp, 1 rank(s)"] == [32.0, 32.0]
    assert seconds["zero3, 4 rank(s)"] == [10.0, 10.0]
    assert seconds["ddp, 2 rank(s), 1 Gbit/s, 500 ms"] == [18.5, 18.5]
    (row,) = (line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ddp, 4"))
    assert [cell.strip() for cell in row] == ["ddp, 4 rank(s)", "10 s", "10 s", "10 s", "3.20", "80%"]
    first, *timed = started
    assert first == ("ddp", 2, "1 Gbit/s, 500 ms", 1), "fills the cache, or reports that there can be no nodes"
    assert len(timed) == 2 * 7
    assert timed[:7] == timed[:6:-1], "every second round in the opposite order"


def test_a_step_on_16_ranks_by_hand():
    """30 messages for each bucket: 15 to add, 15 to distribute the sums. Buckets wait for the one before."""
    assert ring_all_reduce(1, 1000, alpha=10, beta=0.1) == 0, "one rank exchanges nothing"
    assert ring_all_reduce(16, 1000, alpha=10, beta=0.1) == pytest.approx(2 * 15 * 10 + 2 * 15 / 16 * 1000 * 0.1)
    assert [bucket_sizes(250), bucket_sizes(MIB / 4)] == [[1000], [MIB]]
    last = 240_000_000 - MIB - 9 * 25 * MIB
    assert bucket_sizes(60e6) == [MIB, *[25 * MIB] * 9, last]
    ready = 0.25 - last / 240_000_000 * 0.25 * 2 / 3
    exchanges = 2 * 30 * 10e-6 + 2 * 15 / 16 * (25 * MIB + last) * 8 / 100e9
    assert predict_step(0.25, 60e6, 16, alpha=10e-6, beta=8e-11) == pytest.approx(ready + exchanges)


@pytest.mark.parametrize(("gbit", "efficiency"), [(100, 0.95), (25, 0.82), (10, 0.47)])
def test_60_million_parameters_scale_to_256_gpus_over_100_gbit_but_not_over_10(numbers, gbit, efficiency):
    """The claim of Li et al. 2020: near-linear with 256 GPUs. docs/scaling.md has these figures."""
    steps = numbers("cluster", f"--step_ms 250 --parameters 60e6 --link_gbit {gbit}")["step"]
    assert list(map(int, steps)) == [2**n for n in range(11)]
    assert round(0.25 / steps["256"], 2) == efficiency
