"""Jobs that a program starts for the user: their settings, and one line if one of them fails."""

from __future__ import annotations

import sys
from unittest.mock import MagicMock, Mock

import pytest

from app import compare, jobs
from app.bench import memory
from app.program import run_program
from app.settings import Settings


@pytest.mark.parametrize(
    ("job", "status", "line"),
    [(Mock(return_value=3), 1, "error: ddp_loop failed "), (Mock(side_effect=KeyboardInterrupt), 130, "interrupted: ")],
)
def test_a_job_that_fails_or_is_interrupted_is_one_line(review_csv, monkeypatch, capsys, tmp_path, job, status, line):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["compare", f"--csv={review_csv()}", "--output_dir=out"])
    monkeypatch.setattr(compare, "run_job", job)
    assert run_program(compare.main) == status
    (shown,) = capsys.readouterr().err.splitlines()
    assert shown.startswith(line)
    assert status != 1 or "out/ddp_loop" in shown


@pytest.mark.parametrize("settings", [Settings(), Settings(model="tiny-bert", seed=1), Settings(max_length=64)])
def test_a_job_gets_these_settings_even_if_it_has_other_defaults(monkeypatch, settings):
    monkeypatch.setattr(jobs, "TorchrunJob", started := MagicMock())
    jobs.run_job("app.bench.memory", settings, 2)
    command = started.call_args.args[0]
    flags = command[command.index("app.bench.memory") + 1 :]
    assert memory.PROGRAM.parse(flags)[0] == settings


def test_of_the_runs_that_are_compared_the_first_prints_its_block(review_csv, monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(compare, "run_job", lambda *job, **environment: started.append((*job, environment)) or 0)
    monkeypatch.setattr(compare, "read_run", lambda folder: folder)
    settings = Settings(csv=str(review_csv()), output_dir=str(tmp_path / "out"), use_cpu=True, seed=3)
    folder, pairs = compare.train_pairs(settings, {"nproc_per_node": "2", "seeds": 2})
    assert pairs == [[folder / f"seed-{seed}" / path for path in jobs.PATHS] for seed in (3, 4)]
    assert [[s.seed, s.output_dir] for _, s, _, _ in started] == [
        [seed, str(run)] for seed, pair in zip((3, 4), pairs, strict=True) for run in pair
    ]
    assert [environment[jobs.BLOCKS] for *_, environment in started] == ["start", "none"] * 2
