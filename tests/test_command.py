"""The command `samebits`: the names of programs, and the status with which a job of several ranks ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from helpers.jobs import LIMIT, PROJECT
from helpers.marks import slow_after

from app import __main__ as command
from app.common.errors import RunError, UserError
from app.distributed import agent, launcher
from app.distributed.preemption import SAME_REQUEST_SECONDS

# A program with ranks whose status is its second argument; -9 is a signal.
RANK = """
import os, signal, sys, time
if sys.argv[1] == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
if sys.argv[1] == "hang":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if sys.argv[1] in ("wait", "hang"):
    open("ready" + os.environ["RANK"], "w").close()
    time.sleep(200)
if os.environ["RANK"] == "0":
    os.kill(os.getpid(), 9) if sys.argv[1] == "-9" else sys.exit(int(sys.argv[1]))
if sys.argv[1] != "0":
    time.sleep(200)
"""
AGENT = "import sys; from app.distributed.agent import run_agent; sys.exit(run_agent(sys.argv[1:]))"


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start Python in a process group of its own, as a terminal does."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(PROJECT), str(tmp_path)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def start_ranks(tmp_path: Path, behavior: str, restarts: int = 0) -> subprocess.Popen[str]:
    (tmp_path / "rank.py").write_text(RANK)
    flags = ["--standalone", "--nproc_per_node=2", "--signals_to_handle=SIGQUIT", f"--max_restarts={restarts}"]
    return start(tmp_path, "-c", AGENT, *flags, "-m", "rank", behavior)


def wait_for(job: subprocess.Popen[str], happened: Callable[[], bool]) -> None:
    while not happened():
        assert job.poll() is None
        time.sleep(0.01)


def wait_until_ready(job: subprocess.Popen[str], tmp_path: Path) -> None:
    wait_for(job, lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)))


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


def ranks_of(job: subprocess.Popen[str]) -> list[psutil.Process]:
    return [process for process in psutil.Process(job.pid).children() if "-u" in process.cmdline()]


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["--help"], 0), (["trian"], 2)])
def test_names_are_listed(monkeypatch, capsys, arguments, status):
    monkeypatch.setattr(sys, "argv", ["samebits", *arguments])
    assert command.main() == status
    out, err = capsys.readouterr()
    assert "experiments.same_bits" in out + err
    assert len(err.splitlines()) == status // 2


@pytest.mark.launched
@pytest.mark.parametrize(("of_rank", "status"), slow_after(1, [("75", 75), ("0", 0), ("2", 2), ("-9", 1)]))
def test_the_status_is_that_of_the_ranks_without_torchruns_output(tmp_path, of_rank, status):
    with start_ranks(tmp_path, of_rank) as job:
        out, err = job.communicate(timeout=LIMIT)
    assert (job.returncode, out, err) == (status, "", "")


@pytest.mark.launched
@pytest.mark.parametrize(
    ("restarts", "number", "status"), slow_after(1, [(2, signal.SIGINT, 130), (0, signal.SIGTERM, 75)])
)
def test_a_signal_reaches_the_ranks_and_ends_the_job_with_their_status(tmp_path, restarts, number, status):
    with start_ranks(tmp_path, "wait", restarts) as job:
        wait_until_ready(job, tmp_path)
        job.send_signal(number)
        out, err = job.communicate(timeout=LIMIT)
    assert (job.returncode, out, err) == (status, "", "")


@pytest.mark.launched
@pytest.mark.slow
def test_a_second_ctrl_c_ends_ranks_that_hang(tmp_path):
    with start_ranks(tmp_path, "hang") as job:
        wait_until_ready(job, tmp_path)
        ranks = ranks_of(job)
        job.send_signal(signal.SIGINT)
        time.sleep(SAME_REQUEST_SECONDS + 0.5)  # an earlier signal would count as a repetition of the first
        assert job.poll() is None
        assert all(rank.is_running() for rank in ranks)
        job.send_signal(signal.SIGINT)
        out, err = job.communicate(timeout=20)
    assert (job.returncode, out, err) == (130, "", "interrupted\n")
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.launched
@pytest.mark.slow
def test_a_rank_that_was_killed_just_before_a_signal_is_no_failure_of_the_launcher(tmp_path):
    with start_ranks(tmp_path, "wait") as job:
        wait_until_ready(job, tmp_path)
        job.send_signal(signal.SIGSTOP)  # so that it finds a zombie
        killed = ranks_of(job)[1]
        killed.kill()
        wait_for(job, lambda: killed.status() == psutil.STATUS_ZOMBIE)
        job.send_signal(signal.SIGTERM)
        job.send_signal(signal.SIGCONT)
        out, err = job.communicate(timeout=LIMIT)
    assert (job.returncode, out, err) == (75, "", "")


@pytest.mark.launched
@pytest.mark.parametrize("number", slow_after(1, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
def test_a_signal_ends_a_job_that_waits_for_its_master(tmp_path, number):
    flags = ["--nnodes=2", "--node_rank=1", "--master_addr=localhost", f"--master_port={free_port()}", "--use_cpu"]
    with start(tmp_path, "-m", "app", "train", "--nproc_per_node=1", *flags) as job:
        wait_for(job, lambda: "pt_elastic" in Path(f"/proc/{job.pid}/comm").read_text())  # torchrun's agent has started
        time.sleep(1)  # it waits in C++
        began = time.monotonic()
        job.send_signal(number)
        out, err = job.communicate(timeout=LIMIT)
    assert (job.returncode, out, err) == (130, "", "interrupted\n")
    assert time.monotonic() - began < 20


@pytest.mark.launched
@pytest.mark.parametrize("launched", slow_after(1, [True, False]))
def test_ctrl_c_while_torch_is_imported_is_one_line(tmp_path, launched):
    program = ["app", "train", "--nproc_per_node=2"] if launched else ["app.ddp_loop"]
    with start(tmp_path, "-m", *program, "--use_cpu") as job:

        def all_import_torch() -> bool:
            processes = ranks_of(job) if launched else [psutil.Process(job.pid)]
            return sum(map(imports_torch, processes)) == (2 if launched else 1)

        wait_for(job, all_import_torch)
        os.killpg(job.pid, signal.SIGINT)
        out, err = job.communicate(timeout=LIMIT)
    assert (job.returncode, out, err) == (130, "", "interrupted\n")


def imports_torch(process: psutil.Process) -> bool:
    return any("libtorch_cpu" in region.path for region in process.memory_maps())


@pytest.fixture
def process_stays(monkeypatch):
    """Keep pytest's handlers of signals, its logging and its environment, which torchrun's agent would change."""
    # Rank 0 of each later job would hold the store, which ends with it.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "to be restored")
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
    monkeypatch.setattr(agent, "forward_signals", lambda: None)
    monkeypatch.setattr(agent.logging, "disable", lambda: None)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--max_restarts=abc"], "argument --max_restarts: invalid int value: 'abc'"),
        (["--nnodes=abc"], "torchrun rejects its flags: .*abc"),
        (["--nnodes=2", "--node_rank=7"], "^--node_rank 7: must be less than --nnodes 2$"),
        (["--nnodes=2", "--node_rank=x"], "argument --node_rank: invalid int value: 'x'"),
        (["--nnodes=2", "--rdzv_backend=bogus", "--rdzv_endpoint=localhost:1"], "^torchrun rejects its flags: .*bogus"),
        (["--nnodes=2", "--rdzv_conf=timeout=abc"], "^torchrun rejects its flags: .*abc"),
        (["--nproc_per_node=0"], "--nproc_per_node 0: must be auto or a whole number"),
    ],
)
def test_mistakes_are_one_line(flags, problem, process_stays):
    with pytest.raises(UserError, match=problem):
        command.run_ranks("ddp_loop", ["--use_cpu", "--nproc_per_node=2", *flags])


def test_a_node_without_contact_is_one_line(process_stays):
    flags = ["--nnodes=2", "--node_rank=1", f"--master_port={free_port()}", "--rdzv_conf=timeout=1"]
    with pytest.raises(RunError, match=r"^no contact with the other nodes: .*timed out"):
        command.run_ranks("ddp_loop", ["--use_cpu", "--nproc_per_node=1", *flags])
    assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1", "restarts on several nodes need it"


@pytest.fixture
def agents_flags(monkeypatch):
    """Return the flags that torchrun's agent gets for a command, which is not started."""

    def flags_of(module, *arguments):
        commands = []
        monkeypatch.setattr(agent, "run_agent", lambda command: commands.append(command) or 0)
        assert command.run_ranks(module, arguments) == 0
        return commands[0]

    return flags_of


def test_torchruns_environment_variables_connect_the_nodes(agents_flags, monkeypatch):
    for name, value in {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "NPROC_PER_NODE": "3"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    monkeypatch.setenv("PET_RDZV_ID", "")  # an unset variable of a shell script
    flags = agents_flags("ddp_loop", "--use_cpu", "--master_addr=10.0.0.2")
    given = {"--nnodes=2", "--node_rank=1", "--master_addr=10.0.0.2", "--nproc_per_node=3"}
    assert {flag for flag in flags if flag.startswith(("--n", "--m", "--r", "--st"))} == given

    monkeypatch.setenv("PET_NNODES", "1")
    with pytest.raises(UserError, match=r"^--node_rank 1: must be less than --nnodes 1$"):
        agents_flags("ddp_loop", "--use_cpu")


@pytest.mark.parametrize(
    ("flags", "alone"), [([], True), (["--nnodes=1"], True), (["--nnodes=2"], False), (["--master_port=1"], False)]
)
def test_a_job_on_one_node_uses_a_free_port(agents_flags, flags, alone):
    assert ("--standalone" in agents_flags("ddp_loop", "--use_cpu", *flags)) is alone


@pytest.mark.parametrize(("flags", "processes"), [([], 8), (["--use_cpu"], 2), (["--use-cpu"], 2)])
def test_a_benchmark_has_a_process_per_gpu_unless_it_uses_the_cpu(agents_flags, monkeypatch, flags, processes):
    monkeypatch.setattr(launcher, "count_gpus", lambda use_cpu: 0 if use_cpu else 8)
    monkeypatch.setattr("app.common.machine.unusable_accelerator", lambda: None)
    assert f"--nproc_per_node={processes}" in agents_flags("bench.memory", *flags)
