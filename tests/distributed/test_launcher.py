"""How many processes a job has by default, and that none of them is left behind."""

from __future__ import annotations

import signal
from contextlib import suppress

import psutil
import pytest
import torch

from app.common.errors import UserError
from app.distributed.launcher import TorchrunJob, resolve_nproc_per_node, torchrun_command
from app.settings import Settings

# Ignores SIGTERM, and starts a process in a session of its own.
DEAF = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
print(os.getpid(), child.pid, os.environ["EXTRA"], flush=True)
signal.pause()
"""


@pytest.fixture
def job(tmp_path):
    """A function that returns a job of this code, in plain python."""

    def of(code: str) -> TorchrunJob:
        (tmp_path / "job.py").write_text(code)
        command = torchrun_command(tmp_path / "job.py", nproc_per_node=0)
        return TorchrunJob(command, environment={"EXTRA": "1"}, stdout=tmp_path / "log")

    return of


def runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() not in ("zombie", "dead")
    return False


def test_leaving_the_context_ends_every_process_of_the_job(job, tmp_path):
    with job(DEAF) as running:
        log = tmp_path / "log"
        parent, child, extra = running.wait_until(lambda: (text := log.read_text()).endswith("\n") and text.split())
        processes = running.processes()
        assert {process.pid for process in processes} == {int(parent), int(child)}
    assert extra == "1"
    assert running.torchrun.returncode == -signal.SIGKILL
    assert not any(map(runs, processes))


def test_waiting_for_a_condition_stops_when_the_job_has_ended(job):
    with job("raise SystemExit(3)") as ended:
        assert ended.wait_until(lambda: False) is None
    assert ended.torchrun.wait() == 3


def test_a_job_does_not_take_over_the_ranks_of_this_process(monkeypatch):
    taken = ("RANK", "WORLD_SIZE", "PET_NNODES")
    for name in taken:
        monkeypatch.setenv(name, "2")
    assert not {*taken} & {*TorchrunJob(["true"]).environment}


@pytest.mark.parametrize(
    ("gpus", "changes", "nodes", "expected"),
    [
        (0, {}, "1", 2),
        (1, {}, "1", 1),
        (7, {}, "1", 4),
        (8, {}, "1", 8),
        (8, {"use_cpu": True}, "1", 2),
        (6, {"train_batch_size": 48}, "1", 6),
        (6, {"train_batch_size": 48}, "1:3", 4),
        (6, {"per_device_train_batch_size": 5}, "1", 6),
        (6, {"logical_ranks": 8}, "1", 4),
        (6, {"logical_ranks": 8}, "4", 2),
        (6, {"train_batch_size": 7}, "1", 1),
        (6, {"gradient_accumulation_steps": 5}, "1", 6),  # no number is right: the job says what would be
    ],
)
def test_auto_is_a_process_per_gpu_as_far_as_the_batch_can_be_divided(monkeypatch, gpus, changes, nodes, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert resolve_nproc_per_node("auto", Settings(**changes), nodes) == expected


@pytest.mark.parametrize("value", ["0", "-1", "two", "", "1.5", "９", "1" * 5000])
def test_any_other_number_of_processes_is_one_line(value):
    with pytest.raises(UserError, match=r"--nproc_per_node .*: must be auto or a whole number, 1 or more") as error:
        resolve_nproc_per_node(value, Settings(use_cpu=True))
    assert len(str(error.value)) < 150
