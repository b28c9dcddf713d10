"""`app.compare` and its jobs: its one line and its status if one of them fails."""

from __future__ import annotations

import sys
from unittest.mock import Mock

import pytest

from app import compare
from app.program import run_program


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
