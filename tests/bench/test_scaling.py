"""app.bench.scaling: its mistakes, and its tables from synthetic times of jobs."""

from __future__ import annotations

import json
import sys

import pandas as pd
import pytest

from app.bench import scaling
from app.program import run_program


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--ranks", "0"], "--ranks: 0: must be a whole number, 1 or more"),
        (["--ranks", "3"], "--train_batch_size 32 cannot be divided among 3 ranks"),
        (["--links", "fast"], "--links: fast: must be Gbit/s:milliseconds, such as 1:5"),
        (["--links", "1:-1"], "--links: 1:-1: must be Gbit/s:milliseconds, such as 1:5"),
        (["--links", "0:1"], "--links: 0:1: must be Gbit/s:milliseconds, such as 1:5"),
        (["--steps", "many"], "--steps: many: must be a whole number, 1 or more"),
        (["--link_gbit", "10"], "--link_gbit: give --step_ms, too"),
        (["--step_ms", "250"], "--step_ms: add --parameters"),
        (["--step_ms", "250", "--parameters", "0"], "--parameters: 0: must be a number above 0"),
        (["--step_ms", "250", "--parameters", "6e7", "--ranks", "2"], "--ranks: with --step_ms, nothing is measured"),
        (["--nothing", "1"], "unknown argument --nothing"),
    ],
)
def test_a_mistake_is_one_line(flags, problem, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["scaling", *flags])
    assert run_program(scaling.main) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert problem in err
    assert not any(tmp_path.iterdir())


@pytest.fixture
def jobs(monkeypatch):
    """What jobs are started. Each step takes 1 s per row of a rank, and 2 s more for an exchange."""
    started = []

    def time_steps(program, flags, *, steps, ranks, threads, link):
        assert program == "train"
        assert not any(flag.startswith(("--output_dir", "--train_batch_size")) for flag in flags), "32 is the default"
        started.append((flags[flags.index("--strategy") + 1], ranks, str(link), steps))
        seconds = 32 / ranks + 2.0 * (ranks > 1) + (link.delay_ms / 1000 if link else 0)
        return pd.Series({"seconds": steps * seconds})

    monkeypatch.setattr(scaling, "time_steps", time_steps)
    return started


def run(monkeypatch, folder, *flags):
    flags = ["--ranks", "1", "2", "4", "--use_cpu", "--rounds", "2", "--steps", "3", *flags]
    monkeypatch.setattr(sys, "argv", ["scaling", "--model", "tiny", "--output_dir", str(folder), *flags])
    assert run_program(scaling.main) == 0
    return json.loads((folder / "scaling.json").read_text())["sections"]["measured"]["seconds"]


def test_speedups_of_known_times(jobs, monkeypatch, tmp_path, capsys):
    seconds = run(monkeypatch, tmp_path / "out", "--links", "1:500", "--strategies", "zero3")
    # 32 rows on one rank; 16 and an exchange on two; 8 and an exchange on four.
    assert seconds["ddp, 1 rank(s)"] == [32.0, 32.0]
    assert seconds["zero3, 4 rank(s)"] == [10.0, 10.0]
    assert seconds["ddp, 2 rank(s), 1 Gbit/s, 500 ms"] == [18.5, 18.5]
    (row,) = (line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ddp, 4"))
    assert [cell.strip() for cell in row] == ["ddp, 4 rank(s)", "10 s", "10 s", "10 s", "3.20", "80%"]
    first, *timed = jobs
    assert first == ("ddp", 2, "1 Gbit/s, 500 ms", 1), "fills the cache, or reports that there can be no nodes"
    assert len(timed) == 2 * 7
    assert timed[:7] == timed[:6:-1], "every second round in the opposite order"
