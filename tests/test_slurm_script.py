"""Test run_scripts/slurm.sh with stand-ins for Slurm's commands: what it requeues, and what it starts on each node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]

# Ends with $STATUS on SIGUSR1, as a job does whose ranks have been asked to stop, or right away.
SRUN = """#!/usr/bin/env bash
trap 'exit "$STATUS"' USR1
printf '%s\\n' "$@" >srun-arguments
env | grep -E '^(NNODES|MASTER_ADDR|RDZV_ID|SRUN_.*|TORCH_.*)=' | sort >srun-environment
if [ -z "${WAIT_FOR_SIGNAL:-}" ]; then exit "$STATUS"; fi
echo running
while :; do sleep 0.02; done
"""
# Slurm may signal the job again when srun has ended.
SCONTROL = """#!/usr/bin/env bash
case $1 in show) printf 'node-a\\nnode-b\\n' ;; *) echo "$@" >>scontrol-calls; kill -USR1 "$PPID" ;; esac
"""
SQUEUE = """#!/usr/bin/env bash
echo "$STATE"
"""
# Like srun: runs the command on two nodes, forwards SIGUSR1, ends both after a failure, returns the highest status.
SRUN_ON_TWO_NODES = f"""#!{sys.executable}
import os, signal, subprocess, sys, time
nodes = [
    subprocess.Popen(sys.argv[2:], env=os.environ | {{"SLURM_NODEID": str(node)}}, start_new_session=True)
    for node in range(2)
]
def send(number):
    for node in nodes:
        if node.poll() is None:
            os.killpg(node.pid, number)
signal.signal(signal.SIGUSR1, lambda number, _: send(number))
while not all(os.path.exists(f"ready-{{node}}") or nodes[node].poll() is not None for node in range(2)):
    time.sleep(0.02)
print("running", flush=True)
while any(node.poll() is None for node in nodes):
    if any(node.poll() for node in nodes):
        send(signal.SIGTERM)
    time.sleep(0.02)
sys.exit(max(node.returncode for node in nodes))
"""
# Like torchrun, ends with 1 after a failure of its ranks, and also when they have saved a checkpoint.
MULTI_NODE = """#!/usr/bin/env bash
trap 'exit 1' USR1 TERM
touch "ready-$NODE_RANK"
for _ in {1..1000}; do [ -e ready-0 ] && [ -e ready-1 ] && break; sleep 0.02; done
if [ "$NODE_RANK" = "${FAILS:-}" ]; then exit 1; fi
for _ in {1..1000}; do sleep 0.02; done # no longer than the test
"""


def write_script(path: Path, script: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)


def start(folder: Path, **environment: str) -> subprocess.Popen[str]:
    for name, script in (("srun", SRUN), ("scontrol", SCONTROL), ("squeue", SQUEUE)):
        if not (folder / name).exists():
            write_script(folder / name, script)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node-[a-b]"}
    variables = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(folder)} | job | environment
    command = ["bash", str(PROJECT / "run_scripts" / "slurm.sh"), "app.ddp_loop", "--csv", "reviews.csv"]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("status", "state", "signaled", "requeued"),
    [
        ("75", "RUNNING", True, True),
        ("75", "COMPLETING", True, False),  # its user has canceled it
        ("3", "RUNNING", True, False),
        ("0", "RUNNING", True, False),
        ("2", "RUNNING", False, False),
    ],
)
def test_only_a_job_that_has_saved_a_checkpoint_is_requeued(tmp_path, status, state, signaled, requeued):
    job = start(tmp_path, STATUS=status, STATE=state, **({"WAIT_FOR_SIGNAL": "yes"} if signaled else {}))
    if signaled:
        assert job.stdout.readline() == "running\n", job.stderr.read()
        job.send_signal(signal.SIGUSR1)
    _, err = job.communicate(timeout=20)
    assert job.returncode == int(status), err
    calls = tmp_path / "scontrol-calls"
    assert (calls.read_text() if calls.exists() else "") == ("requeue 7\n" if requeued else "")


@pytest.mark.parametrize("fails", ["0", "1", None])
def test_a_job_on_two_nodes_is_requeued_after_a_signal_but_not_after_a_failure(tmp_path, fails):
    """After a failure, Slurm signals the other node, which would otherwise look as if it had saved a checkpoint."""
    write_script(tmp_path / "srun", SRUN_ON_TWO_NODES)
    write_script(tmp_path / "run_scripts" / "multi_node.sh", MULTI_NODE)
    job = start(tmp_path, STATE="RUNNING", **({"FAILS": fails} if fails else {}))
    assert job.stdout.readline() == "running\n"
    if fails is None:
        job.send_signal(signal.SIGUSR1)
    _, err = job.communicate(timeout=20)
    assert job.returncode == (1 if fails else 75), err
    assert (tmp_path / "scontrol-calls").exists() == (fails is None)


def test_every_node_starts_the_module_and_resumes_the_jobs_run(tmp_path):
    start(tmp_path, STATUS="0", SLURM_CPUS_PER_TASK="32").communicate(timeout=20)
    assert (tmp_path / "srun-environment").read_text().split() == [
        *("MASTER_ADDR=node-a", "NNODES=2", "RDZV_ID=slurm-7", "SRUN_CPUS_PER_TASK=32"),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100",
    ]
    arguments = (tmp_path / "srun-arguments").read_text().splitlines()
    assert arguments[0] == "--kill-on-bad-exit=1"
    flags = ["--output_dir", "runs/slurm-7", "--resume_from_checkpoint", "auto", "--csv", "reviews.csv"]
    assert arguments[-len(flags) - 1 :] == ["app.ddp_loop", *flags]


def test_settings_of_the_user_are_kept_and_a_job_need_not_name_its_cores(tmp_path):
    start(tmp_path, STATUS="0", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="300").communicate(timeout=20)
    names = (tmp_path / "srun-environment").read_text().split()
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300" in names
    assert not [name for name in names if name.startswith("SRUN")]
