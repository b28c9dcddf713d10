"""Start jobs of several ranks, on this machine or on two nodes of it with a link between them, and compare them.

A laboratory that compares whole trainings starts each of them as a job of its own, in alternating rounds. What is
timed is then the command that a user types, as the job's own log of steps has it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from ..common.errors import RunError, UserError, escape_control_characters
from ..common.paths import PACKAGE
from ..common.terminal import hides_progress
from ..distributed.launcher import TorchrunJob, torchrun_command
from ..runs.schema import STEPS
from .two_nodes import ADDRESSES, INTERFACE, Link, inside, two_nodes

PORT = 29500  # free, because a namespace has ports of its own
LINK_VARIABLE = "SAMEBITS_LINK"  # set for the ranks of a job on two nodes: its link
END_SECONDS = 60.0  # that the second node has to end after the first
WARM_UP = 5  # steps that are not timed: DDP rearranges its buckets after the first one, and TCP adapts to a link
# The host waits for a GPU at the end of the warm-up, so its time does not count later.
RUN_FLAGS = ["--eval_strategy", "no", "--save_strategy", "no", "--logging_steps", WARM_UP, "--disable_tqdm"]
COLUMNS = ["examples", "tokens", "padded_tokens", "seconds"]  # of a log of steps


def run_job(
    program: str | Path,
    flags: Sequence[Any],
    *,
    ranks: int,
    threads: int = 0,
    link: Link | None = None,
    log: Path | None = None,
) -> int:
    """Run a program of `samebits`, such as `train`, or a script under torchrun, and return its exit status.

    Args:
        ranks: of the job, divided among the nodes.
        threads: of each rank; 0: the program's default.
        link: between two nodes on this machine, on which the job then runs; by default, there is only one node.
        log: file for what the job prints; by default, it prints to this process's output.

    Raises:
        NamespacesUnavailable: this machine, or this user, cannot have two nodes.
        UserError, RunError: a job with a log reports a mistake, or has failed.
    """
    variables = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    with ExitStack() as stack:
        nodes = stack.enter_context(two_nodes(link)) if link else []
        if isinstance(program, Path):
            commands = [torchrun_command(program, flags, nproc_per_node=ranks)]
        else:  # not torchrun, which adds 30 lines to a mistake and replaces the status
            start = [sys.executable, "-m", PACKAGE, program, f"--nproc_per_node={ranks // max(1, len(nodes))}"]
            commands = [[*start, *map(str, flags), *([f"--threads={threads}"] if threads else [])]]
        if link:
            variables |= {"GLOO_SOCKET_IFNAME": INTERFACE, LINK_VARIABLE: str(link)}
            place = [f"--nnodes={len(nodes)}", f"--master_addr={ADDRESSES[0]}", f"--master_port={PORT}"]
            commands = [inside(name, [*commands[0], *place, f"--node_rank={i}"]) for i, name in enumerate(nodes)]
        logs = [log and log.with_name(f"{log.name}-{node}") for node in range(len(commands))]
        jobs = [
            stack.enter_context(TorchrunJob(command, environment=variables, stdout=output))
            for command, output in zip(commands, logs, strict=True)
        ]
        statuses = [jobs[0].torchrun.wait(), *(job.torchrun.wait(END_SECONDS) for job in jobs[1:])]
    status = next(filter(None, statuses), 0)
    if status and log:
        printed = "\n".join(output.read_text(errors="replace") for output in logs if output)
        problems = [line.removeprefix("error: ") for line in printed.splitlines() if line.startswith("error: ")]
        message = problems[0] if problems else f"{program}: exit status {status}: {' '.join(printed[-1000:].split())}"
        raise (UserError if status == 2 else RunError)(escape_control_characters(message))
    return status


def time_steps(
    program: str | Path, flags: Sequence[Any], *, steps: int, ranks: int, threads: int, link: Link | None = None
) -> pd.Series:
    """Train in a job of its own, and return the sums of `COLUMNS` over its steps after the first `WARM_UP`.

    Args:
        program: a training path; or a script, to which the number of steps and the log to write are given last.
        steps: that are timed.
    """
    with tempfile.TemporaryDirectory(prefix="samebits-") as name:
        folder = Path(name)
        run, total = folder / "run", WARM_UP + steps
        if isinstance(program, Path):
            output, flags = folder / STEPS.name, [*flags, total, folder / STEPS.name]
        else:
            output = run / STEPS.name
            flags = [*flags, *RUN_FLAGS, "--output_dir", run, "--max_steps", total]
        run_job(program, flags, ranks=ranks, threads=threads, link=link, log=folder / "log")
        return pd.read_json(output, lines=True)[COLUMNS].iloc[WARM_UP:].sum()


def alternate_jobs(jobs: Mapping[str, Callable[[], pd.Series]], rounds: int) -> pd.DataFrame:
    """Run each job once per round, in every second round in the opposite order.

    Returns:
        What the jobs have returned: a row for each round and job, by the number of the round and the name.
    """
    order = [(number, name) for number in range(rounds) for name in list(jobs)[:: -1 if number % 2 else 1]]
    bar = tqdm(order, unit=" jobs", leave=False, disable=hides_progress())
    results = {(number, name): jobs[name]() for number, name in bar}
    return pd.DataFrame(results).T.rename_axis(["round", "job"])
