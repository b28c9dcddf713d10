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
    "SIGTERM in an evaluation": (signal.SIGTERM, []),  # which a rank sends itself
}
# A node is lost if it has been silent for 5 s. The others then wait up to 5 s for more nodes.
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=5"


def stop(path: str, flags: Sequence[str], run: Path, interruption: str) -> int:
    """Start a run on two ranks and send it signals. Return the step after which all ranks have saved and stopped."""
    number, targets = SIGNALS[interruption]
    program = [path] if targets else [FAULTY, path, "signal_in_evaluation"]
    with Job(*program, *flags, *COMMON, f"--output_dir={run}", cwd=run.parent, SIGNAL=number.name) as job:
        job.wait_for(lambda: count_steps(run) >= (5 if targets else 1))
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


def lose_second_node(nodes: list[str], path: str, flags: Sequence[str], run: Path, trains_without: bool) -> None:
    """Lose the second of two nodes and bring it back. Meanwhile the job waits for it, or trains on one rank."""
    # multi_node.sh changes to the project's folder.
    places = [f"--csv={run.parent / 'reviews.csv'}", f"--cache_dir={run.parent / 'cache'}", f"--output_dir={run}"]
    job = {"NNODES": "1:2" if trains_without else "2", "MAX_RESTARTS": "3", "RDZV_CONF": RENDEZVOUS}
    logs: list[Path] = []

    def start_on(node: int) -> subprocess.Popen[bytes]:
        logs.append(run.with_name(f"{run.name}-{len(logs)}.log"))
        return start(nodes, node, "c10d", f"app.{path}", *flags, *COMMON, *places, log=logs[-1], **job)

    def printed() -> str:
        return "\n".join(log.read_text() for log in logs)

    def trains_on(ranks: int) -> bool:
        settings = run / "settings.json"  # a job that starts or resumes writes it before its first step
        return settings.exists() and json.loads(settings.read_text())["world_size"] == ranks

    def require(happened: Callable[[], bool]) -> None:
        wait_until(happened, 120)
        assert happened(), printed()

    first, second = map(start_on, range(2))
    require(lambda: trains_on(2) and count_steps(run) >= 10)
    kill_node(nodes[1])
    second.wait(60)
    if trains_without:
        require(lambda: trains_on(1))
        before = count_steps(run)
        require(lambda: count_steps(run) > before)
    second = start_on(1)
    wait_for_all([first, second], 360)
    assert [first.returncode, second.returncode] == [0, 0], printed()
    assert "resumed from" in printed()
    assert trains_on(2)
    assert not [pid for node in nodes for pid in processes_on(node)]
