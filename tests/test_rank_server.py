"""Jobs of the rank server are like real processes, whatever they do, and leave nothing behind."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.jobs import Job

pytestmark = pytest.mark.launched


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Job]:
    """A job that runs a text as a Python script: `script("print(1)", ranks=2)`."""

    def write(text: str, *flags: Any, ranks: int = 0, **options: Any) -> Job:
        path = tmp_path / "script.py"
        path.write_text(text)
        return Job(str(path), *flags, cwd=tmp_path, ranks=ranks, **options)

    return write


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_job_gets_its_command_line_environment_and_folder(script, tmp_path, ranks):
    text = "import os, sys; print(sys.argv[1:], os.environ['X'], os.getcwd(), os.environ.get('RANK'), flush=True)"
    with script(text, "--a", "b", ranks=ranks, X="y") as job:
        done = job.finish(60)
    expected = {f"['--a', 'b'] y {tmp_path} {rank}" for rank in (range(ranks) if ranks else [None])}
    assert (done.status, {*done.out.splitlines()}) == (0, expected)


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


def test_the_first_rank_that_dies_ends_a_job(script):
    text = "import os, signal\nif os.environ['RANK'] == '1': os._exit(3)\nsignal.pause()"
    with script(text, ranks=3) as job:
        done = job.finish(60)
    assert done.status == 1
    assert "exitcode  : 3" in done.err, "torchrun's own report"


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


def test_nothing_is_left_for_the_next_job(script):
    change = "import os, torch, app.settings; os.environ['Y'] = '1'; torch.manual_seed(5); app.settings.Settings = None"
    look = "import os, torch, app.settings; print(os.environ.get('Y'), torch.initial_seed(), app.settings.Settings)"
    with script(look) as job:
        before = job.finish(60)
    with script(change) as job:
        job.finish(60)
    with script(look) as job:
        assert job.finish(60).out == before.out
    assert before.out.startswith("None ")
