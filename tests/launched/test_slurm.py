"""run_scripts/slurm.sh on a real Slurm, which this test sets up on this machine: preempted, requeued and resumed."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers.jobs import PROJECT, SAMPLE_CSV, unavailable
from launched.two_nodes import wait_until
from torch.distributed.elastic.utils.distributed import get_free_port

from app.distributed.launcher import TorchrunJob, torchrun_command
from app.runs.hashes import hash_results

pytestmark = [pytest.mark.launched, pytest.mark.slow]
PROGRAMS = ("slurmctld", "slurmd", "sbatch")
HOST = socket.gethostname().partition(".")[0]
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={host} NodeAddr=127.0.0.1 CPUs=2
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=120
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=off
"""
FLAGS = [f"--csv={SAMPLE_CSV}", "--use_cpu", "--threads=1", "--disable_tqdm", "--eval_strategy=no"]
FLAGS += ["--max_length=32", "--max_steps=150", "--save_strategy=steps", "--save_steps=100", "--logging_steps=5"]


class Slurm:
    """A cluster of one node with two cores: partition `high` preempts the jobs of partition `low`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.configuration = folder, folder / "slurm.conf"
        for name in ("state", "spool"):
            (folder / name).mkdir()
        ports = [get_free_port() for _ in range(2)]
        self.configuration.write_text(CONFIGURATION.format(host=HOST, folder=folder, ports=ports))
        self.environment = os.environ | {
            "SLURM_CONF": str(self.configuration),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        # Each job has an OMP_NUM_THREADS of its own; pytest's would be a user's.
        self.environment.pop("OMP_NUM_THREADS", None)

    def call(self, *command: str) -> str:
        return subprocess.run(
            command, env=self.environment, cwd=PROJECT, capture_output=True, text=True, timeout=60
        ).stdout.strip()

    def submit(self, *arguments: str) -> str:
        """Submit a job, and return its id."""
        return self.call("sbatch", "--parsable", "--nodes=1", "--cpus-per-task=2", "--time=10", *arguments)

    def job(self, job: str, field: str) -> str:
        found = re.search(rf"\b{field}=(\S+)", self.call("scontrol", "show", "job", job))
        return found[1] if found else ""

    def wait_for(self, job: str, state: str) -> None:
        wait_until(lambda: self.job(job, "JobState") == state, 120)
        assert self.job(job, "JobState") == state, self.call("scontrol", "show", "job", job)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        unavailable(f"no {missing[0]}: apt-get install slurm-wlm")
    if os.geteuid() != 0:
        unavailable("Slurm's daemons need root")
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    with ExitStack() as stack:
        for command in (["slurmctld", "-D", "-i"], ["slurmd", "-D"]):
            out = stack.enter_context((cluster.folder / f"{command[0]}.out").open("wb"))
            daemon = subprocess.Popen(command, env=cluster.environment, stdout=out, stderr=out)
            stack.enter_context(daemon)  # waits for its end
            stack.callback(daemon.terminate)
        stack.callback(cluster.call, "scancel", "--user=root")
        wait_until(lambda: cluster.call("sinfo", "--noheader", "--format=%T", "--partition=low") == "idle", 60)
        yield cluster


def test_a_preempted_job_is_requeued_and_ends_with_the_hash_of_an_uninterrupted_run(slurm, tmp_path):
    command = torchrun_command("app.ddp_loop", [*FLAGS, f"--output_dir={tmp_path / 'expected'}"])
    with TorchrunJob(command, cwd=PROJECT) as expected:
        assert expected.torchrun.wait(240) == 0
    run = tmp_path / "run"
    log = Path(f"{run}.log")
    script = ["run_scripts/slurm.sh", "app.ddp_loop", *FLAGS, f"--output_dir={run}"]
    job = slurm.submit("--gpus-per-node=0", f"--output={log}", *script)
    wait_until(lambda: log.exists() and re.search(r"step \d+/", log.read_text()) is not None, 120)
    other = slurm.submit("--partition=high", f"--output={tmp_path}/other.log", "--wrap=true")
    slurm.wait_for(other, "COMPLETED")
    slurm.wait_for(job, "PENDING")
    assert slurm.job(job, "Restarts") == "1", log.read_text()
    assert not (run / "metrics.json").exists()
    slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now")  # by default, Slurm waits for a minute
    slurm.wait_for(job, "COMPLETED")
    assert re.search(r"resumed from .*\(step \d+\)", log.read_text())
    assert hash_results(run) == hash_results(tmp_path / "expected")
