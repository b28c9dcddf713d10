"""Jobs that a program starts for the user."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from app import jobs
from app.bench.models import measure_tiny_bert
from app.cli import CommandLine
from app.settings import Settings


@pytest.mark.parametrize("settings", [Settings(), Settings(model="tiny-bert", seed=1), Settings(max_length=64)])
def test_a_job_gets_these_settings_even_if_it_has_other_defaults(monkeypatch, settings):
    started = MagicMock()
    monkeypatch.setattr(jobs, "TorchrunJob", started)
    jobs.run_job("app.bench.memory", settings, 2)
    command = started.call_args.args[0]
    flags = command[command.index("app.bench.memory") + 1 :]
    assert CommandLine(None, measure_tiny_bert).parse(flags)[0] == settings
