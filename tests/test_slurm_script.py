"""run_scripts/slurm.sh on two nodes, with stand-ins for Slurm: what it requeues, and what it starts on each node.

tests/launched/test_slurm.py runs it on a real Slurm of one node.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.jobs import PROJECT

# Like srun: runs the command on two nodes, forwards SIGUSR1, ends both after a failure, returns the highest status.
SRUN = f"""#!{sys.executable}
import json, os, signal, subprocess, sys, time
json.dump([sys.argv[1:], dict(os.environ)], open("srun.json", "w"))
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
trap 'exit "${AFTER_SIGNAL:-1}"' USR1 TERM
touch "ready-$NODE_RANK"
for _ in {1..1000}; do [ -e ready-0 ] && [ -e ready-1 ] && break; sleep 0.02; done
if [ "$NODE_RANK" = "${FAILS:-}" ]; then exit 1; fi
for _ in {1..1000}; do sleep 0.02; done # no longer than the test
"""
# Slurm may signal the job again when srun has ended.
SCONTROL = """#!/usr/bin/env bash
case $1 in show) printf 'node-a\\nnode-b\\n' ;; *) echo "$@" >>requeued; kill -USR1 "$PPID" ;; esac
"""
SQUEUE = """#!/usr/bin/env bash
echo "$STATE"
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., int]:
    """Run slurm.sh as a job, and return its exit status. A job in which no node fails gets a signal from Slurm."""
    scripts = {"srun": SRUN, "scontrol": SCONTROL, "squeue": SQUEUE, "run_scripts/multi_node.sh": MULTI_NODE}
    for name, script in scripts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node-[a-b]", "STATE": "RUNNING"}
    slurm |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
    command = ["bash", str(PROJECT / "run_scripts" / "slurm.sh"), "app.ddp_loop", "--csv", "reviews.csv"]

    def start(**environment: str) -> int:
        with subprocess.Popen(command, env=slurm | environment, stdout=subprocess.PIPE, text=True) as job:
            assert job.stdout is not None
            assert job.stdout.readline() == "running\n"
            if "FAILS" not in environment:
                job.send_signal(signal.SIGUSR1)
            job.communicate(timeout=20)
        return job.returncode

    return start


@pytest.mark.parametrize(
    ("environment", "status", "requeued"),
    [
        ({}, 75, True),
        ({"STATE": "COMPLETING"}, 75, False),  # its user has canceled it
        ({"AFTER_SIGNAL": "0"}, 0, False),  # the run finished before it noticed the signal
        # Slurm then signals the other node, which would otherwise look as if it had saved a checkpoint.
        ({"FAILS": "0"}, 1, False),
        ({"FAILS": "1"}, 1, False),
    ],
)
def test_only_a_job_that_has_saved_a_checkpoint_is_requeued(run, tmp_path, environment, status, requeued):
    assert run(**environment) == status
    assert (tmp_path / "requeued").exists() == requeued
    assert not requeued or (tmp_path / "requeued").read_text() == "requeue 7\n"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"SLURM_CPUS_PER_TASK": "32"}, {"SRUN_CPUS_PER_TASK": "32", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "100"}),
        # A setting of the user is kept, and a job need not name its cores.
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}),
    ],
)
def test_every_node_starts_the_module_and_resumes_the_jobs_run(run, tmp_path, given, expected):
    run(**given)
    arguments, environment = json.loads((tmp_path / "srun.json").read_text())
    expected = {"MASTER_ADDR": "node-a", "NNODES": "2", "RDZV_ID": "slurm-7"} | expected
    names = ("MASTER_ADDR", "NNODES", "RDZV_ID", "SRUN_", "TORCH_")
    assert {name: value for name, value in environment.items() if name.startswith(names)} == expected
    assert arguments[0] == "--kill-on-bad-exit=1"
    flags = ["--output_dir", "runs/slurm-7", "--resume_from_checkpoint", "auto", "--csv", "reviews.csv"]
    assert arguments[-len(flags) - 1 :] == ["app.ddp_loop", *flags]
