"""Run torchrun as a child process. Every program and test that starts a job uses this module.

    command = torchrun_command("app.ddp_loop", ["--max_steps=3"], nproc_per_node=2)
    with TorchrunJob(command) as job:
        status = job.wait(timeout=300)

The job never outlives the `with` block: an exception that ends it, such as Ctrl-C, ends all of the job's processes.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

from ..common.paths import CLONE
from .processes import CPU_PROCESSES

# Environment variable that marks all processes of a job: the job's id, after those of the jobs that it is part of.
JOB_VARIABLE = "SAMEBITS_JOB"
# A job that is started from within another job must not inherit its ranks, nor its number of nodes (PET_NNODES is the
# default of torchrun's --nnodes, also with --standalone): it would wait for nodes that do not start it.
NOT_INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "PET_NNODES")
LEFTOVER_SECONDS = 15.0
GRACE_SECONDS = 40.0  # torchrun itself gives its workers 30 s between SIGTERM and SIGKILL
POLL_SECONDS = 0.02
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


class TorchrunJob:
    """A job and all of its processes. Entering the context starts the job, leaving it ends the remaining processes.

    Args:
        command: from `torchrun_command`, possibly after a prefix that replaces itself with it, such as `unshare -m`.
        environment: variables to add to this process's own.
        cwd: the job's working directory; by default this process's. Our modules can be imported from anywhere.
        stdout: file for the job's standard output; by default this process's standard output.
        stderr: file for standard error; by default the same as `stdout`.
        grace_seconds: time between SIGTERM and SIGKILL when a running job is terminated; 0 kills it at once.

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
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self.command, self.cwd = list(command), cwd
        self.stdout, self.stderr, self.grace_seconds = stdout, stderr, grace_seconds
        self.job_id = uuid.uuid4().hex
        inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        if CLONE is not None:  # `app` can be imported from there only
            inherited["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CLONE), os.environ.get("PYTHONPATH")]))
        job_ids = "/".join(filter(None, [os.environ.get(JOB_VARIABLE), self.job_id]))
        self.environment = inherited | dict(environment or {}) | {JOB_VARIABLE: job_ids}

    def start(self) -> None:
        """Start the job. Call it through the `with` statement."""
        with ExitStack() as files:
            stdout = files.enter_context(self.stdout.open("wb")) if self.stdout else None
            stderr = files.enter_context(self.stderr.open("wb")) if self.stderr else None
            self.torchrun = subprocess.Popen(
                self.command,
                cwd=self.cwd,
                env=self.environment,
                stdout=stdout,
                stderr=stderr or (subprocess.STDOUT if stdout else None),
                # Ctrl-C in a terminal would reach torchrun twice, and the second signal interrupts its clean-up.
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Whether torchrun is still running."""
        return self.torchrun.poll() is None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for torchrun to end; return its exit status (negative for a signal).

        Raises:
            TimeoutError: it is still running after `timeout` seconds.
        """
        try:
            return self.torchrun.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"still running after {timeout:g} s: {' '.join(self.command)}") from None

    def wait_until(self, condition: Callable[[], T], timeout: float = math.inf) -> T | None:
        """Poll until a condition is true; return its value, or None if the job ended first.

        Raises:
            TimeoutError: the condition is still false after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the condition was not met within {timeout:g} s: {' '.join(self.command)}")
            with suppress(subprocess.TimeoutExpired):
                self.torchrun.wait(POLL_SECONDS)
                return None
        return value

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the job and of jobs that it started, in any session and with any parent."""
        return [p for p in psutil.process_iter() if self.job_id in _variable(p, JOB_VARIABLE).split("/")]

    def find_rank(self, rank: int, restart_count: int | None = None) -> psutil.Process | None:
        """Return the process of a rank, after so many restarts if that is given, or None if there is none."""
        # Only torchrun's own children: a data loader's workers inherit the rank's environment.
        with suppress(psutil.Error):
            for process in psutil.Process(self.torchrun.pid).children():
                count = _variable(process, "TORCHELASTIC_RESTART_COUNT")
                if _variable(process, "RANK") == str(rank) and restart_count in (None, int(count or 0)):
                    return process
        return None

    def kill_leftovers(self, timeout: float = LEFTOVER_SECONDS) -> list[str]:
        """Kill the processes that still exist after torchrun has ended; return their command lines.

        Args:
            timeout: seconds to wait for them first: torchrun's helpers take a moment to notice that it has ended, and
                ranks finish their step.
        """
        leftovers = []
        for process in self._wait_for_processes(timeout):
            with suppress(psutil.Error):
                leftovers.append(" ".join(process.cmdline()))
                process.kill()
        self._wait_for_processes(LEFTOVER_SECONDS)
        return leftovers

    def _wait_for_processes(self, timeout: float) -> list[psutil.Process]:
        """Wait up to `timeout` seconds until the job's processes have ended; return those that have not."""
        # Not psutil.wait_procs(), which waits for zombies too; in a container they may stay forever.
        deadline = time.monotonic() + timeout
        while (alive := self.processes()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return alive

    def __enter__(self) -> TorchrunJob:
        try:
            self.start()
        except BaseException:  # such as an interrupt
            self.__exit__()
            raise
        return self

    def __exit__(self, *failure: object) -> None:
        # A second Ctrl-C must not interrupt this.
        handlers = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            if not (hasattr(self, "torchrun") and self.running):
                self.kill_leftovers()
                return
            if self.grace_seconds:
                self.torchrun.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self.torchrun.wait(self.grace_seconds)
            self.torchrun.kill()  # before the ranks, which it could restart
            self.torchrun.wait()
            self.kill_leftovers(timeout=min(self.grace_seconds, 2.0))
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _variable(process: psutil.Process, name: str) -> str:
    """Return an environment variable of a process; empty without it, or if the process has ended."""
    with suppress(psutil.Error):  # it has ended, or belongs to another user
        return str(process.environ().get(name, ""))
    return ""
