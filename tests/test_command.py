"""The command `samebits`: the names of programs, and the status with which a job of several ranks ends."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers.jobs import Job
from helpers.marks import slow_after
from torch.distributed.elastic.utils.distributed import get_free_port

from app import __main__ as command
from app.distributed import agent, launcher
from app.distributed.preemption import SAME_REQUEST_SECONDS

# A program with ranks whose status is its argument; -9 is a signal.
RANK = """
import os, signal, sys, time
if sys.argv[1] == "store":  # restarts on several nodes need it
    sys.exit(os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1")
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


def run_ranks(folder: Path, behavior: str, restarts: int = 0, nodes: str = "1") -> Job:
    """A job of two ranks on this node, whose agent is started as `samebits` does it."""
    (folder / "rank.py").write_text(RANK)
    (folder / "agent.py").write_text(AGENT)
    flags = [f"--nnodes={nodes}", "--nproc_per_node=2", "--signals_to_handle=SIGQUIT", f"--max_restarts={restarts}"]
    flags += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--rdzv_conf=last_call_timeout=1"]
    return Job(str(folder / "agent.py"), *flags, "rank.py", behavior, cwd=folder, ranks=0)


def samebits(folder: Path, *arguments: str, real: bool = False) -> Job:
    return Job("app.__main__", *arguments, "--use_cpu", cwd=folder, ranks=0, real=real)


def wait_until_ready(job: Job) -> list[psutil.Process]:
    """Wait until both ranks wait for a signal. Return their processes."""
    job.wait_for(lambda: all((job.cwd / f"ready{rank}").exists() for rank in range(2)))
    return ranks_of(job)


def ranks_of(job: Job) -> list[psutil.Process]:
    return [process for process in psutil.Process(job.torchrun.pid).children() if "-u" in process.cmdline()]


def check_end(job: Job, status: int, err: str = "") -> None:
    done = job.finish()
    assert (done.status, done.out, done.err) == (status, "", err)


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["--help"], 0), (["trian"], 2)])
def test_names_are_listed(monkeypatch, capsys, arguments, status):
    monkeypatch.setattr(sys, "argv", ["samebits", *arguments])
    assert command.main() == status
    out, err = capsys.readouterr()
    assert "experiments.same_bits" in out + err
    assert len(err.splitlines()) == status // 2


@pytest.mark.launched
@pytest.mark.parametrize(
    ("of_rank", "nodes", "status"),
    slow_after(1, [("75", "1", 75), ("0", "1", 0), ("2", "1", 2), ("-9", "1", 1), ("store", "1:2", 0)]),
)
def test_the_status_is_that_of_the_ranks_without_torchruns_output(tmp_path, of_rank, nodes, status):
    with run_ranks(tmp_path, of_rank, nodes=nodes) as job:
        check_end(job, status)


@pytest.mark.launched
@pytest.mark.parametrize(
    ("restarts", "number", "status"), slow_after(1, [(2, signal.SIGINT, 130), (0, signal.SIGTERM, 75)])
)
def test_a_signal_reaches_the_ranks_and_ends_the_job_with_their_status(tmp_path, restarts, number, status):
    with run_ranks(tmp_path, "wait", restarts) as job:
        wait_until_ready(job)
        job.torchrun.send_signal(number)
        check_end(job, status)


@pytest.mark.launched
@pytest.mark.slow
def test_a_second_ctrl_c_ends_ranks_that_hang(tmp_path):
    with run_ranks(tmp_path, "hang") as job:
        ranks = wait_until_ready(job)
        job.torchrun.send_signal(signal.SIGINT)
        time.sleep(SAME_REQUEST_SECONDS + 0.5)  # an earlier signal would count as a repetition of the first
        assert job.torchrun.poll() is None
        assert all(rank.is_running() for rank in ranks)
        job.torchrun.send_signal(signal.SIGINT)
        check_end(job, 130, "interrupted\n")


@pytest.mark.launched
@pytest.mark.slow
def test_a_rank_that_was_killed_just_before_a_signal_is_no_failure_of_the_launcher(tmp_path):
    with run_ranks(tmp_path, "wait") as job:
        _, killed = wait_until_ready(job)
        job.torchrun.send_signal(signal.SIGSTOP)  # so that it finds a zombie
        killed.kill()
        job.wait_for(lambda: killed.status() == psutil.STATUS_ZOMBIE)
        job.torchrun.send_signal(signal.SIGTERM)
        job.torchrun.send_signal(signal.SIGCONT)
        check_end(job, 75)


@pytest.mark.launched
@pytest.mark.parametrize("number", slow_after(1, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
def test_a_signal_ends_a_job_that_waits_for_its_master(tmp_path, number):
    flags = ["--nnodes=2", "--node_rank=1", "--master_addr=localhost", f"--master_port={get_free_port()}"]
    # A fork would print the warnings of torch, which reads its log level when it is imported.
    with samebits(tmp_path, "train", "--nproc_per_node=1", *flags, real=True) as job:
        # The name of the thread of torchrun's agent.
        job.wait_for(lambda: "pt_elastic" in Path(f"/proc/{job.torchrun.pid}/comm").read_text())
        time.sleep(1)  # it waits in C++
        began = time.monotonic()
        job.torchrun.send_signal(number)
        check_end(job, 130, "interrupted\n")
    assert time.monotonic() - began < 20


@pytest.mark.launched
@pytest.mark.parametrize("launched", slow_after(1, [True, False]))
def test_ctrl_c_while_torch_is_imported_is_one_line(tmp_path, launched):
    program = ["app.__main__", "train", "--nproc_per_node=2"] if launched else ["app.ddp_loop"]
    with Job(*program, "--use_cpu", cwd=tmp_path, ranks=0, real=True) as job:

        def all_import_torch() -> bool:
            processes = ranks_of(job) if launched else [psutil.Process(job.torchrun.pid)]
            return sum(map(imports_torch, processes)) == (2 if launched else 1)

        job.wait_for(all_import_torch)
        os.killpg(job.torchrun.pid, signal.SIGINT)
        check_end(job, 130, "interrupted\n")


def imports_torch(process: psutil.Process) -> bool:
    return any("libtorch_cpu" in region.path for region in process.memory_maps())


@pytest.mark.launched
@pytest.mark.parametrize(
    ("flags", "status", "problem"),
    [
        ("--max_restarts=abc", 2, "argument --max_restarts: invalid int value: 'abc'"),
        ("--nproc_per_node=0", 2, "--nproc_per_node 0: must be auto or a whole number"),
        ("--nnodes=2 --node_rank=7", 2, "--node_rank 7: must be less than --nnodes 2"),
        ("--nnodes=abc", 2, "torchrun rejects its flags: .*abc"),
        ("--nnodes=2 --rdzv_backend=bogus --rdzv_endpoint=localhost:1", 2, "torchrun rejects its flags: .*bogus"),
        ("--nnodes=2 --node_rank=1 --rdzv_conf=timeout=1", 1, "no contact with the other nodes: .*timed out"),
    ],
)
def test_a_mistake_and_a_node_without_contact_are_one_line(tmp_path, flags, status, problem):
    fails = status == 1  # a fork would print warnings of torch here, too
    port = [f"--master_port={get_free_port()}"] if fails else []
    with samebits(tmp_path, "train", "--nproc_per_node=2", *flags.split(), *port, real=fails) as job:
        done = job.finish()
    assert (done.status, done.out) == (status, "")
    (line,) = done.err.splitlines()
    assert re.match(f"error: {problem}", line)


@pytest.mark.parametrize(
    ("arguments", "environment", "flags"),
    [
        ("ddp_loop --use_cpu", {}, {"--standalone", "--nproc_per_node=2"}),  # a free port
        ("ddp_loop --use_cpu --nnodes=1", {}, {"--standalone", "--nnodes=1", "--nproc_per_node=2"}),
        ("ddp_loop --use_cpu --nnodes=2", {}, {"--nnodes=2", "--nproc_per_node=2"}),
        ("ddp_loop --use_cpu --master_port=1", {}, {"--master_port=1", "--nproc_per_node=2"}),
        (
            "ddp_loop --use_cpu --nnodes=2 --master_addr=10.0.0.2",
            # An empty variable, as a shell script leaves it, is none.
            {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "NPROC_PER_NODE": "3", "RDZV_ID": ""},
            {"--nnodes=2", "--node_rank=1", "--master_addr=10.0.0.2", "--nproc_per_node=3"},
        ),
        ("bench.memory", {}, {"--standalone", "--nproc_per_node=8"}),
        ("bench.memory --use-cpu", {}, {"--standalone", "--nproc_per_node=2"}),
    ],
)
def test_torchruns_agent_gets_the_flags_of_the_user_and_of_the_environment(monkeypatch, arguments, environment, flags):
    commands = []
    monkeypatch.setattr(agent, "run_agent", lambda command: commands.append(command) or 0)
    monkeypatch.setattr(launcher, "count_gpus", lambda use_cpu: 0 if use_cpu else 8)
    for name, value in environment.items():
        monkeypatch.setenv(f"PET_{name}", value)
    module, *given = arguments.split()
    assert command.run_ranks(module, given) == 0
    assert {flag for flag in commands[0] if flag.startswith(("--n", "--m", "--r", "--st"))} == flags
