"""Interruptions of a run that need a job of their own: signals, restarts by torchrun, and lost nodes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from helpers.jobs import Job, count_steps
from launched.two_nodes import kill_node, processes_on, start, wait_for_all, wait_until

FAULTY = str(Path(__file__).with_name("faulty.py"))
COMMON = ["--use_cpu", "--threads=1", "--disable_tqdm", "--cache_dir=cache"]
SIGNALS = {  # the number, and the processes that get it
    "SIGTERM to rank 1": (signal.SIGTERM, ["rank 1"]),
    "SIGUSR1 to rank 0": (signal.SIGUSR1, ["rank 0"]),
    "SIGINT to torchrun": (signal.SIGINT, ["torchrun"]),
    "SIGUSR1 to torchrun": (signal.SIGUSR1, ["torchrun"]),
    "SIGTERM to torchrun and all ranks": (signal.SIGTERM, ["torchrun", "rank 0", "rank 1"]),  # as Slurm does
}
# A node is lost if it has been silent for 5 s. The others then wait up to 5 s for more nodes.
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=5"


def stop(path: str, flags: Sequence[str], run: Path, interruption: str) -> int:
    """Start a run on two ranks and send it signals. Return the step after which all ranks have saved and stopped."""
    number, targets = SIGNALS[interruption]
    with Job(path, *flags, *COMMON, f"--output_dir={run}", cwd=run.parent) as job:
        job.wait_for(lambda: count_steps(run) >= 5)
        processes = {f"rank {rank}": job.rank(rank) for rank in range(2)} | {"torchrun": job.torchrun}
        for target in targets:
            processes[target].send_signal(number)
        done = job.finish(30)  # the time between SIGTERM and SIGKILL that torchrun and Slurm grant
    (line,) = (line for line in done.err.splitlines() if line.startswith("stopped: after step "))
    if "torchrun" not in targets:
        assert "exitcode  : 75" in done.err
    step = int(line.split()[3])
    assert count_steps(run) == step
    assert not (run / "metrics.json").exists()
    return step


def kill_in_evaluation(path: str, flags: Sequence[str], folder: Path) -> list[int]:
    """Kill a rank in the first evaluation; torchrun restarts the job. Return the steps from which it resumes."""
    options = {"torchrun_flags": ("--standalone", "--max-restarts=1"), "SIGNAL": "SIGKILL"}
    with Job(FAULTY, path, "signal_in_evaluation", *flags, *COMMON, cwd=folder, **options) as job:
        done = job.finish()
    assert done.status == 0, done.err
    return [int(step) for step in re.findall(r"resumed from .*\(step (\d+)\)", done.out)]


class NodeJob:
    """One job on two nodes, whose second node comes and goes."""

    def __init__(self, nodes: list[str], path: str, flags: Sequence[str], run: Path, **place: str) -> None:
        self.nodes, self.run = nodes, run
        self.arguments = ["c10d", f"app.{path}", *flags, *COMMON, f"--output_dir={run}"]
        # multi_node.sh changes to the project's folder.
        self.arguments += [f"--csv={run.parent / 'reviews.csv'}", f"--cache_dir={run.parent / 'cache'}"]
        self.place = {"MAX_RESTARTS": "3", "RDZV_CONF": RENDEZVOUS} | place
        self.logs: list[Path] = []
        self.jobs = [self.start(rank) for rank in range(2)]

    def start(self, rank: int) -> subprocess.Popen[bytes]:
        log = self.run.with_name(f"{self.run.name}-{len(self.logs)}.log")
        self.logs.append(log)
        return start(self.nodes, rank, *self.arguments, log=log, **self.place)

    def require(self, happened: Callable[[], bool], seconds: float) -> None:
        wait_until(happened, seconds)
        assert happened(), self.printed()

    def kill_second_node(self) -> None:
        kill_node(self.nodes[1])
        self.jobs.pop().wait(60)

    def bring_it_back(self) -> None:
        self.jobs.append(self.start(1))

    def trains_on(self, ranks: int) -> bool:
        settings = self.run / "settings.json"  # a job that starts or resumes writes it before its first step
        return settings.exists() and json.loads(settings.read_text())["world_size"] == ranks

    def finish(self) -> None:
        wait_for_all(self.jobs, 240)
        assert [job.returncode for job in self.jobs] == [0, 0], self.printed()
        assert "resumed from" in self.printed()
        assert self.trains_on(2)
        assert not [pid for node in self.nodes for pid in processes_on(node)]

    def printed(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)


def lose_second_node(job: NodeJob, trains_without: bool) -> None:
    """Lose the second node and bring it back. Meanwhile the job waits for it, or trains on one rank."""
    job.require(lambda: job.trains_on(2) and count_steps(job.run) >= 10, 120)
    job.kill_second_node()
    if trains_without:
        job.require(lambda: job.trains_on(1), 120)
        before = count_steps(job.run)
        job.require(lambda: count_steps(job.run) > before, 120)
    job.bring_it_back()
    job.require(lambda: job.trains_on(2), 120)
    job.finish()
