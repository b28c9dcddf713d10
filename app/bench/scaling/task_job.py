"""A torchrun job that performs tasks for this process: see `app.bench.scaling.job`."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from ...common.errors import RunError, UserError, shorten
from ...common.paths import PACKAGE
from ...distributed.launcher import TorchrunJob, torchrun_command
from ..link.jobs import commands_on_nodes
from .configuration import ScalingPlan

START_SECONDS, TASK_SECONDS, END_SECONDS = 300.0, 300.0, 60.0
LONGEST_TMPDIR = 75  # bytes; the path of a Unix socket may have about 100


class TaskJob:
    """A running job. Methods raise `RunError` if it has ended, or takes too long."""

    def __init__(self, ranks: int, nodes: Sequence[TorchrunJob], listener: socket.socket) -> None:
        self.ranks, self._nodes, self._listener = ranks, nodes, listener
        self._connection: Connection | None = None
        self._processes: list[psutil.Process] = []

    def connect(self) -> None:
        """Wait until all ranks have joined the process group."""
        try:
            accepted = self._nodes[0].wait_until(self._accept, START_SECONDS)
        except TimeoutError:
            raise RunError(f"the job of {self.ranks} rank(s) did not start within {START_SECONDS:.0f} s") from None
        if accepted is None:
            raise self._failure()
        accepted.setblocking(True)  # on some systems it inherits the listener's mode
        self._connection = Connection(accepted.detach())
        self._processes = [process for node in self._nodes for process in node.processes()]

    def perform(self, **task: Any) -> Any:
        """Let all ranks perform a task, and return its result: see `app.bench.scaling.job`."""
        assert self._connection is not None, "connect() first"
        try:
            self._connection.send(task)
            if self._connection.poll(TASK_SECONDS):
                return self._connection.recv()
        except (EOFError, OSError):
            raise self._failure() from None
        raise RunError(f"the job of {self.ranks} rank(s) took more than {TASK_SECONDS:.0f} s for {task}")

    def cpu_seconds(self) -> float:
        """Return the CPU time that the job's processes have used so far."""
        seconds = 0.0
        for process in self._processes:
            with suppress(psutil.Error):  # one of torchrun's helpers has ended
                times = process.cpu_times()
                seconds += times.user + times.system
        return seconds

    def close(self) -> None:
        """Let the ranks leave, without waiting for them."""
        if self._connection is not None:
            self._connection.close()

    def wait(self) -> None:
        """Wait until the job has ended, without an error."""
        try:
            statuses = [node.wait(END_SECONDS) for node in self._nodes]
        except TimeoutError:
            raise RunError(f"the job of {self.ranks} rank(s) did not end within {END_SECONDS:.0f} s") from None
        if any(statuses):
            raise self._failure()

    def _accept(self) -> socket.socket | None:
        try:
            return self._listener.accept()[0]
        except BlockingIOError:
            return None

    def _failure(self) -> RunError:
        logs = " and ".join(str(node.stdout) for node in self._nodes)
        return RunError(f"the job of {self.ranks} rank(s) failed: see {logs}")


def check_temporary_folder() -> None:
    """Raise `UserError` if the folder for temporary files has a name that is too long for a socket in it."""
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > LONGEST_TMPDIR:
        raise UserError(
            f"TMPDIR {shorten(folder)}: its name is too long for a socket: at most {LONGEST_TMPDIR} bytes, such as /tmp"
        )


@contextmanager
def task_job(plan: ScalingPlan, ranks: int, *, log: Path, namespaces: Sequence[str] = ()) -> Iterator[TaskJob]:
    """Start a job without waiting for it; end it at the end of the block.

    Args:
        ranks: on each node.
        log: file for what the job prints; with two nodes, the first one's.
        namespaces: of two nodes; none: one node, in this namespace.
    """
    world_size = ranks * max(1, len(namespaces))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="samebits-")))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(folder / "socket"))
        listener.listen()
        listener.setblocking(False)
        flags = [f"--architecture={plan.model}", f"--socket={folder / 'socket'}", f"--threads={plan.threads}"]
        flags += [f"--train_batch_size={world_size}", "--disable_tqdm", *([] if plan.gpus else ["--use_cpu"])]
        module = f"{PACKAGE}.bench.scaling.job"
        commands, variables = [torchrun_command(module, flags, nproc_per_node=ranks)], dict[str, str]()
        if namespaces:
            commands, variables = commands_on_nodes(module, flags, namespaces, nproc_per_node=ranks)
        jobs = []
        for node, command in enumerate(commands):
            file = log if node == 0 else log.with_name(f"{log.stem}-{node}{log.suffix}")
            job = TorchrunJob(command, environment=variables, stdout=file, grace_seconds=5)
            jobs.append(stack.enter_context(job))
        yield stack.enter_context(closing(TaskJob(world_size, jobs, listener)))
