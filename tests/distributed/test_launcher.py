"""Jobs as child processes: their command, their processes, and that none of these is left behind."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from app.distributed.launcher import TorchrunJob, torchrun_command

# Starts a process in a session of its own, prints both ids, and waits for a signal that it may ignore.
PARENT = """
import os, signal, subprocess, sys
if sys.argv[1] == "ends":
    sys.exit(3)
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
print(os.getpid(), child.pid, os.environ["EXTRA"], flush=True)
signal.pause()
"""


@pytest.fixture
def job(tmp_path):
    """A function that returns a job, plain python without torchrun, whose parent process behaves as asked."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)

    def of(behavior: str, **options) -> TorchrunJob:
        command = torchrun_command(script, [behavior], nproc_per_node=0)
        return TorchrunJob(command, environment={"EXTRA": "1"}, stdout=tmp_path / "log", **options)

    return of


def printed(job: TorchrunJob) -> list[str] | None:
    """What the parent process has printed, or None before it has started its child."""
    text = job.stdout.read_text()
    return text.split() if text.endswith("\n") else None


def exist(*pids: str) -> bool:
    """Tell whether any of the processes still runs. One that has been killed may take a moment to disappear."""
    deadline = time.monotonic() + 10
    while alive := [pid for pid in pids if is_running(int(pid))]:
        if time.monotonic() > deadline:
            return True
        psutil.wait_procs([psutil.Process(int(pid)) for pid in alive if psutil.pid_exists(int(pid))], timeout=0.05)
    return False


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in ("zombie", "dead")
    except psutil.NoSuchProcess:
        return False


def test_a_command_runs_a_module_or_a_script_with_or_without_torchrun():
    assert torchrun_command("app.ddp_loop", ["--seed", 1], nproc_per_node=0) == [
        sys.executable,
        "-m",
        "app.ddp_loop",
        "--seed",
        "1",
    ]
    command = torchrun_command(
        Path("/a/script.py"), (), nproc_per_node=3, torchrun_flags=["--standalone", "--max-restarts=2"]
    )
    assert command[1:3] == ["-m", "torch.distributed.run"]
    assert command[3:] == ["--standalone", "--max-restarts=2", "--nproc_per_node=3", "/a/script.py"]


def test_leaving_the_context_ends_every_process_of_the_job(job):
    with job("deaf") as running:
        parent, child, extra = running.wait_until(lambda: printed(running))
        assert {process.pid for process in running.processes()} == {int(parent), int(child)}
    assert extra == "1"
    assert running.torchrun.returncode == -signal.SIGKILL
    assert not exist(parent, child)


def test_waiting_for_a_condition_stops_when_the_job_has_ended(job):
    with job("ends") as ended:
        assert ended.wait_until(lambda: False) is None
    assert ended.torchrun.wait() == 3


def test_a_job_does_not_take_over_the_ranks_of_this_process(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("PET_NNODES", "2")
    job = TorchrunJob(["true"])
    assert not {"RANK", "WORLD_SIZE", "PET_NNODES"} & set(job.environment)
