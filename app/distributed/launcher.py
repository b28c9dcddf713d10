"""Run torchrun as a child process. Every program and test that starts a job uses this module.

    command = torchrun_command("app.ddp_loop", ["--max_steps=3"], nproc_per_node=2)
    with TorchrunJob(command) as job:
        status = job.torchrun.wait(timeout=300)

The job never outlives the `with` block: an exception that ends it, such as Ctrl-C, kills all of the job's processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil

from ..common.errors import UserError, shorten
from ..common.paths import CLONE
from ..settings import Settings

CPU_PROCESSES = 2  # of a job without GPUs
# A job that is started from within another job must not inherit its ranks, nor its number of nodes (PET_NNODES is the
# default of torchrun's --nnodes, also with --standalone): it would wait for nodes that do not start it.
NOT_INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "PET_NNODES")
KILL_SECONDS = 5.0  # in which the kernel ends killed processes; zombies may stay forever in a container
POLL_SECONDS = 0.02
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
T = TypeVar("T")


def torchrun_command(
    program: str | Path,
    flags: Sequence[Any] = (),
    *,
    nproc_per_node: int = CPU_PROCESSES,
    torchrun_flags: Sequence[str] = ("--standalone",),
) -> list[str]:
    """Return the command that runs a program under torchrun, with this interpreter.

    Args:
        program: a module's name, or a script's path, which ends in `.py`.
        flags: the program's; converted to text.
        nproc_per_node: number of processes; 0 for plain python without torchrun.
        torchrun_flags: more flags of torchrun; by default a single node, which finds a free port itself.
    """
    target = [str(program)] if str(program).endswith(".py") else ["-m", str(program)]
    torchrun = ["-m", "torch.distributed.run", *torchrun_flags, f"--nproc_per_node={nproc_per_node}"]
    return [sys.executable, *(torchrun if nproc_per_node else []), *target, *map(str, flags)]


def resolve_nproc_per_node(value: str, settings: Settings, nodes: str = "1") -> int:
    """Convert the value of `--nproc_per_node`, `auto` or a number, to a number of processes.

    `auto` is one process per GPU, or 2 without GPUs; fewer if the batch cannot be divided among so many.

    Args:
        nodes: the number of nodes. Of a range such as `1:2`, the largest number counts.

    Raises:
        UserError: neither `auto` nor a positive whole number.
    """
    if value == "auto":
        largest = nodes.rpartition(":")[2]
        n_nodes = int(largest) if largest.isdecimal() else 1
        most = count_gpus(settings.use_cpu) or CPU_PROCESSES
        return next((n for n in range(most, 0, -1) if settings.divides_among(n * n_nodes)), most)
    # At most 4 digits: int() rejects very long numbers.
    if value.isascii() and value.isdecimal() and len(value) <= 4 and int(value) > 0:
        return int(value)
    raise UserError(f"--nproc_per_node {shorten(value)}: must be auto or a whole number, 1 or more")


def count_gpus(use_cpu: bool) -> int:
    """Return the number of GPUs that a job may use, without creating a CUDA context, which would occupy memory."""
    if use_cpu:
        return 0
    import torch  # here: --help and a user's mistake need not wait for it

    return torch.cuda.device_count()  # asks the driver


class TorchrunJob:
    """A job and all of its processes. Entering the context starts the job, leaving it ends the remaining processes.

    Args:
        command: from `torchrun_command`, possibly after a prefix that replaces itself with it, such as `unshare -m`.
        environment: variables to add to this process's own.
        cwd: the job's working directory; by default this process's. Our modules can be imported from anywhere.
        stdout: file for the job's standard output; by default this process's standard output.
        stderr: file for standard error; by default the same as `stdout`.

    Attributes:
        torchrun: the child process: torchrun, or python if `nproc_per_node` is 0.
    """

    torchrun: subprocess.Popen[bytes]

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdout: Path | None = None,
        stderr: Path | None = None,
    ) -> None:
        self.command, self.cwd, self.stdout, self.stderr = list(command), cwd, stdout, stderr
        inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        if CLONE is not None:  # `app` can be imported from there only
            inherited["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CLONE), os.environ.get("PYTHONPATH")]))
        self.environment = inherited | dict(environment or {})

    def __enter__(self) -> Self:
        with ExitStack() as files:
            stdout = files.enter_context(self.stdout.open("wb")) if self.stdout else None
            stderr = files.enter_context(self.stderr.open("wb")) if self.stderr else None
            self.torchrun = subprocess.Popen(
                self.command,
                cwd=self.cwd,
                env=self.environment,
                stdout=stdout,
                stderr=stderr or (subprocess.STDOUT if stdout else None),
                start_new_session=True,  # Ctrl-C in a terminal is for this process only, which ends the job
            )
        return self

    def wait_until(self, condition: Callable[[], T]) -> T | None:
        """Poll until a condition is true; return its value, or None if the job ended first."""
        while not (value := condition()):
            with suppress(subprocess.TimeoutExpired):
                self.torchrun.wait(POLL_SECONDS)
                return None
        return value

    def processes(self) -> list[psutil.Process]:
        """Return the processes of a running job and of jobs that it started, in any session."""
        with suppress(psutil.NoSuchProcess):
            torchrun = psutil.Process(self.torchrun.pid)
            return [torchrun, *torchrun.children(recursive=True)]
        return []

    def find_rank(self, rank: int, restart_count: int | None = None) -> psutil.Process | None:
        """Return the process of a rank, after so many restarts if that is given, or None if there is none."""
        wanted = {"RANK": str(rank)}
        if restart_count is not None:
            wanted["TORCHELASTIC_RESTART_COUNT"] = str(restart_count)
        for process in self.processes():
            with suppress(psutil.Error):  # it has just ended
                # Only torchrun's own children: a data loader's workers inherit the rank's environment.
                if process.ppid() == self.torchrun.pid and wanted.items() <= process.environ().items():
                    return process
        return None

    def __exit__(self, *failure: object) -> None:
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)  # a second Ctrl-C waits
        self.torchrun.send_signal(signal.SIGSTOP)  # it can neither restart a rank nor lose sight of one meanwhile
        processes = self.processes()
        self.torchrun.kill()
        self.torchrun.wait()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, KILL_SECONDS)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
