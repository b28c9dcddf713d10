"""Jobs of the rank server are like real processes, whatever they do, and leave nothing behind."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from helpers.jobs import Job

pytestmark = pytest.mark.launched


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Job]:
    """A job that runs a text as a Python script: `script("print(1)", ranks=2)`."""

    def write(text: str, ranks: int = 0, real: bool = False) -> Job:
        path = tmp_path / "script.py"
        path.write_text(text)
        return Job(str(path), cwd=tmp_path, ranks=ranks, real=real)

    return write


@pytest.mark.parametrize(
    ("text", "status", "line"),
    [
        ("import sys; sys.exit(7)", 7, None),
        ("import sys; sys.exit('no such file')", 1, "no such file"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, None),
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV, None),
        ("import atexit; atexit.register(print, 'at the end')", 0, None),
    ],
)
def test_a_job_that_dies_has_the_status_of_a_process(script, text, status, line):
    finished = []
    for real in (True, False):
        with script(text, real=real) as job:
            finished.append(job.finish(60))
    assert [done.status for done in finished] == [status, status]
    assert finished[0].out == finished[1].out
    assert all(line is None or line in done.err.splitlines() for done in finished)


def test_a_job_that_hangs_reaches_its_limit_and_is_killed_with_all_that_it_started(script):
    text = "import signal, subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True); signal.pause()"
    with script(text, ranks=2) as job:
        job.wait_for(lambda: len(job.processes()) == 5)  # the agent, two ranks and what they started
        processes = job.processes()
        with pytest.raises(AssertionError, match="timed out after 1 seconds"):
            job.finish(1)
    assert psutil.wait_procs(processes, timeout=30)[1] == []


def test_a_process_that_a_job_leaves_behind_is_found_and_killed(script):
    with script("import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)") as job:
        with pytest.raises(AssertionError, match="left processes behind"):
            job.finish(60, patience=1)
        assert job.processes() == []
