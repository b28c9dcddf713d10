"""Jobs that a program starts for the user."""

from __future__ import annotations

import pytest

from app import jobs
from app.bench.models import measure_tiny_bert
from app.cli import CommandLine
from app.settings import Settings


@pytest.mark.parametrize("settings", [Settings(), Settings(model="tiny-bert", seed=1), Settings(max_length=64)])
def test_a_job_gets_these_settings_also_if_it_has_other_defaults(monkeypatch, settings):
    commands = []

    class Job:
        def __init__(self, command, environment):
            commands.append(command)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def wait(self):
            return 3

    monkeypatch.setattr(jobs, "TorchrunJob", Job)
    assert jobs.run_job("app.bench.memory", settings, 2) == 3
    (command,) = commands
    flags = command[command.index("app.bench.memory") + 1 :]
    assert CommandLine(None, measure_tiny_bert).parse(flags)[0] == settings
