"""Jobs that a program starts for the user: their settings, and one line if one of them fails."""

from __future__ import annotations

import sys
from unittest.mock import MagicMock, Mock

import pytest

from app import compare, jobs
from app.bench.models import measure_tiny_bert
from app.cli import CommandLine
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
    assert CommandLine(None, measure_tiny_bert).parse(flags)[0] == settings
