"""app.bench.scaling: its table from synthetic times of jobs."""

from __future__ import annotations

import json
import sys

import pandas as pd

from app.bench import scaling
from app.program import run_program


def test_speedups_of_known_times(tmp_path, monkeypatch, capsys):
    started = []

    def time_steps(program, flags, *, steps, ranks, threads, link):
        """Take 1 s per row of a rank, and 2 s more for an exchange."""
        started.append((flags[flags.index("--strategy") + 1], ranks, str(link), steps))
        seconds = 32 / ranks + 2.0 * (ranks > 1) + (link.delay_ms / 1000 if link else 0)
        return pd.Series({"seconds": steps * seconds})

    monkeypatch.setattr(scaling, "time_steps", time_steps)
    monkeypatch.chdir(tmp_path)
    flags = "--ranks 1 2 4 --use_cpu --rounds 2 --steps 3 --model tiny --links 1:500 --strategies zero3"
    monkeypatch.setattr(sys, "argv", ["scaling", *flags.split(), "--output_dir=out"])
    assert run_program(scaling.main) == 0
    seconds = json.loads((tmp_path / "out" / "scaling.json").read_text())["sections"]["measured"]["seconds"]
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
