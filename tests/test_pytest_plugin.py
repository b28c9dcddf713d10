"""The fixture `trajectory`, in a repository that a test makes: it records, fails and is skipped as it promises."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
from helpers.jobs import PROJECT

from app import diff
from app.common import machine

pytest_plugins = "pytester"
KEPT = diff, machine  # pytester forgets the modules that its runs import first
TEST = """
import sys

def train():
    import torch
    weight = torch.tensor(1.0)
    for i in range(20):
        weight = (weight - 0.1 * weight.sin()).detach().requires_grad_()
        yield {"loss": weight.cos(), "seconds": 1.0}

def test_the_plugin_imports_nothing_heavy():
    assert not {"torch", "pandas", "numpy"} & {*sys.modules}

def test_rows(trajectory):
    trajectory("sine", train)

def test_the_path_of_a_log(trajectory, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 3, "loss": 0.1}')
    trajectory("log", lambda: log)
"""


@pytest.fixture
def repository(pytester, monkeypatch):
    """A git repository with tests. Calling it runs them: `repository(*flags)` returns the status and the output.

    They run in this process, which has imported torch, unless they are started as a user does.
    """
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # of this project, which may be installed
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    pytester.makepyfile(test_it=TEST)
    (pytester.path / ".gitignore").write_text("runpytest-*\nstd*\n")  # what pytester itself writes
    author = ["-c", "user.name=someone", "-c", "user.email=someone@example.com"]
    for command in (["init"], ["add", "--all"], [*author, "commit", "--message", "Tests"]):
        subprocess.run(["git", *command], check=True, stdout=subprocess.DEVNULL)

    def run(*flags, as_user=False):
        if as_user:
            done = pytester.runpytest_subprocess("-p", "app.pytest_plugin", *flags)
        else:
            done = pytester.runpytest_inprocess("-p", "app.pytest_plugin", "-rs", "-k", "not heavy", *flags)
        return done.ret, done.stdout.str() + done.stderr.str()

    return run


def test_what_is_recorded_from_a_commit_passes_until_one_step_changes(repository, pytester):
    status, out = repository()
    assert (status, out.count("sine.jsonl: not recorded yet: run pytest --update-trajectories\n")) == (1, 1)
    assert repository("--update-trajectories")[0] == 0
    recorded = pytester.path / "trajectories" / "sine.jsonl"
    header, *lines = map(json.loads, recorded.read_text().splitlines())
    assert [(line["step"], [*line]) for line in lines] == [(step, ["step", "loss"]) for step in range(1, 21)]
    status, out = repository(as_user=True)
    assert (status, "warning" in out) == (0, False), "tensors may require gradients"
    test = pytester.path / "test_it.py"
    for old, new, expected in (
        ("weight.sin()", "weight.sin() * (1 + 1e-5 * (i == 7))", r"first difference:\n +step +A +B\nloss +8 "),
        ("range(20)", "range(19)", r"last step of B: 19\n(.*\n)*exact matches: 19\n"),
        ('"seconds"', '"norm"', r"norm +0 +20 +0 "),
    ):
        test.write_text(TEST.replace(old, new))
        status, out = repository()
        assert status == 1
        assert re.search(expected, out)
        assert "Traceback" not in out
    before = recorded.read_text()
    status, out = repository("--update-trajectories")
    assert (status, out.strip()) == (4, "ERROR: --update-trajectories: commit these changes first: test_it.py")
    assert recorded.read_text() == before
    recorded.write_text(before.replace(header["hardware"], "another CPU"))
    status, out = repository()
    assert (status, out.count(f"sine.jsonl was recorded with another CPU, and this is {header['hardware']}")) == (0, 1)


def test_outside_a_repository_nothing_is_recorded(repository, pytester):
    (pytester.path / ".git").rename(pytester.path / "moved")
    status, out = repository("--update-trajectories")
    assert (status, out.strip().count("\n")) == (4, 0)
    assert out.startswith("ERROR: --update-trajectories: needs a git repository: fatal: not a git repository")
