"""The command `samebits`: the names of programs, and the status with which a job of several ranks ends."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.jobs import LIMIT, PROJECT

from app import __main__ as command

# A program with ranks whose status is its second argument; -9 is a signal.
RANK = """
import os, signal, sys, time
if sys.argv[1] == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    open("ready" + os.environ["RANK"], "w").close()
    time.sleep(200)
if os.environ["RANK"] == "0":
    os.kill(os.getpid(), 9) if sys.argv[1] == "-9" else sys.exit(int(sys.argv[1]))
if sys.argv[1] != "0":
    time.sleep(200)
"""
AGENT = "import sys; from app.__main__ import run_agent; sys.exit(run_agent(sys.argv[1:]))"


def run(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    (tmp_path / "rank.py").write_text(RANK)
    flags = ["--standalone", "--nproc_per_node=2", "--signals_to_handle=SIGQUIT", "-m", "rank"]
    path = os.pathsep.join([str(PROJECT), str(tmp_path)])
    return subprocess.Popen(
        [sys.executable, "-c", AGENT, *arguments[:-1], *flags, arguments[-1]],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("name", [*command.WITH_RANKS, *command.OTHERS])
def test_every_program_exists(name):
    assert importlib.util.find_spec(f"app.{(command.WITH_RANKS | command.OTHERS)[name]}") is not None


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["--help"], 0), (["trian"], 2)])
def test_names_are_listed(monkeypatch, capsys, arguments, status):
    monkeypatch.setattr(sys, "argv", ["samebits", *arguments])
    assert command.main() == status
    out, err = capsys.readouterr()
    assert "experiments.same_bits" in out + err
    assert len(err.splitlines()) == status // 2


@pytest.mark.launched
@pytest.mark.parametrize(("of_rank", "status"), [("0", 0), ("2", 2), ("75", 75), ("-9", 1)])
def test_the_status_is_that_of_the_ranks_without_torchruns_output(tmp_path, of_rank, status):
    with run(tmp_path, of_rank) as job:
        out, err = job.communicate(timeout=LIMIT)
    assert (job.returncode, out, err) == (status, "", "")


@pytest.mark.launched
@pytest.mark.parametrize(("restarts", "number", "status"), [(0, signal.SIGTERM, 75), (2, signal.SIGINT, 130)])
def test_a_signal_reaches_the_ranks_and_ends_the_job_with_their_status(tmp_path, restarts, number, status):
    with run(tmp_path, f"--max_restarts={restarts}", "wait") as job:
        while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
            assert job.poll() is None
            time.sleep(0.05)
        job.send_signal(number)
        out, err = job.communicate(timeout=LIMIT)
    assert (job.returncode, out, err) == (status, "", "")
