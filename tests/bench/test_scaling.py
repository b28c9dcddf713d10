"""app.bench.scaling: its tables from synthetic times of jobs, and steps on a cluster."""

from __future__ import annotations

import json
import sys

import pandas as pd
import pytest

from app.bench import scaling
from app.program import run_program


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


@pytest.mark.parametrize(("gbit", "efficiency"), [(100, 0.9514), (25, 0.8181), (10, 0.4681)])
def test_60_million_parameters_scale_to_256_gpus_over_100_gbit_but_not_over_10(numbers, capsys, gbit, efficiency):
    """The claim of Li et al. 2020: near-linear with 256 GPUs. These are the figures of its formulas."""
    steps = numbers("cluster", f"--step_ms 250 --parameters 60e6 --link_gbit {gbit}")["step"]
    assert list(map(int, steps)) == [2**n for n in range(11)]
    assert steps["1"] == pytest.approx(0.25), "one rank exchanges nothing"
    assert 0.25 / steps["256"] == pytest.approx(efficiency, abs=5e-5)
    assert "in 11 bucket(s)" in capsys.readouterr().out, "a smaller first one, and 25 MiB each"
