"""Jobs that a program starts for the user."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from app import jobs
from app.bench.models import measure_tiny_bert
from app.cli import CommandLine
from app.settings import Settings


@pytest.mark.parametrize("settings", [Settings(), Settings(model="tiny-bert", seed=1), Settings(max_length=64)])
def test_a_job_gets_these_settings_even_if_it_has_other_defaults(monkeypatch, settings):
    commands = []

    def start(command, environment):
        commands.append(command)
        return contextlib.nullcontext(SimpleNamespace(torchrun=SimpleNamespace(wait=lambda: 3)))

    monkeypatch.setattr(jobs, "TorchrunJob", start)
    assert jobs.run_job("app.bench.memory", settings, 2) == 3
    flags = commands[0][commands[0].index("app.bench.memory") + 1 :]
    assert CommandLine(None, measure_tiny_bert).parse(flags)[0] == settings
