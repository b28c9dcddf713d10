"""Jobs as forks of one process that has imported PyTorch, transformers and the application.

Importing them takes seconds in every rank, which is most of a launched test. `rank_server` starts one process per
worker of pytest. It forks a supervisor for each job, and the supervisor forks the job, which runs a command line such
as `python -m torch.distributed.run --nproc_per_node=2 -m app.ddp_loop`. torchrun's own agent runs there, and its ranks
are forks, too. Signals, exit statuses, sessions, environment and output are those of real processes, and nothing is
left for the next job: when the test closes the job, its supervisor kills what is left of it.

What differs from a new interpreter: variables that libraries read when they are imported have no effect (see
`can_fork`), `/proc/PID/environ` and the command line are those of the server, and all ranks share one seed of Python's
hashes.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil

PROJECT = Path(__file__).parents[2]
PIDS = "RANK_PIDS"  # variable: the folder in which each of a job's ranks has a file with its process id
IMPORTED = (
    *("torch.distributed.run", "torch.distributed._composable", "helpers.architectures", "app.metrics.score"),
    *("app.check", "app.compare", "app.ddp_loop", "app.minimal", "app.predict", "app.trainer_run"),
)
READ_BY_IMPORTS = ("HF_", "TRANSFORMERS_", "LD_", "PYTHONHASHSEED")
OF_SESSION = dict(os.environ)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl


# ---- in the tests ---------------------------------------------------------------------------------------------------


def can_fork(environment: Mapping[str, str]) -> bool:
    """Tell whether the server's imports have read the same variables that the job's own imports would read."""
    read, expected = (
        {name: value for name, value in variables.items() if name.startswith(READ_BY_IMPORTS)}
        for variables in (environment, OF_SESSION | {"HF_HUB_OFFLINE": "1"})
    )
    return sys.platform == "linux" and read == expected


class ForkedJob(subprocess.Popen[bytes]):
    """A job of the rank server. It is not a child of this process, so the server reports its end; the rest is Popen's.

    Attributes:
        pid: the process of the job's command, which leads a session.
    """

    def __init__(self, args: Sequence[str], **request: Any) -> None:
        """Start a job; the request has `env`, `cwd`, and the paths `stdout` and `stderr`."""
        self.args, self.returncode, self._child_created = list(args), None, False
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(rank_server())
        self.socket.sendall(json.dumps({"args": self.args, **request}, default=str).encode() + b"\n")
        self.file = self.socket.makefile("rb", buffering=0)  # `select` would not see what a buffer has read
        self.supervisor, self.pid = map(int, self.file.readline().split())

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: the job is still running.
        """
        if self.returncode is None:
            if not select.select([self.socket], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(self.file.readline())
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the job that run, in any session: orphans become children of the supervisor."""
        return running_children(self.supervisor)

    def close(self) -> None:
        """Kill what is left of the job."""
        self.file.close()
        self.socket.close()


def running_children(pid: int) -> list[psutil.Process]:
    running = []
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                if process.status() != psutil.STATUS_ZOMBIE:
                    running.append(process)
    return running


@functools.cache
def rank_server() -> str:
    """Start the server of this process, and return the name of its socket, which has no file."""
    name = f"rank-server-{os.getpid()}"
    places = os.pathsep.join(map(str, (PROJECT, PROJECT / "tests")))
    environment = os.environ | {"PYTHONPATH": places, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # whose locks would stay locked in a fork
    command = [sys.executable, "-m", "helpers.rank_server", name]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n", "the rank server did not start"
    return f"\0{name}"


# ---- in the server --------------------------------------------------------------------------------------------------


class ForkedProcess(subprocess.Popen[bytes]):
    """A process that runs a command line of this interpreter as a fork of this process. The rest is Popen's."""

    def __init__(
        self,
        args: Sequence[str],
        env: Mapping[str, str],
        stdout: Any = None,
        stderr: Any = None,
        cwd: str | None = None,
        start_new_session: bool = True,
    ) -> None:
        self.args, self.returncode = list(args), None
        self.stdin = self.stdout = self.stderr = None
        self._waitpid_lock, self._child_created = threading.Lock(), True  # what Popen's methods need
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            if PIDS in env and "RANK" in env:
                Path(env[PIDS], env["RANK"]).write_text(str(self.pid))
            return
        try:
            for number, file in ((1, stdout), (2, stderr)):
                if file is not None:
                    os.dup2(file.fileno(), number)
            # As in a new process, except for the memory: the handlers of signals, and no other open file.
            signal.set_wakeup_fd(-1)
            for number in signal.valid_signals():
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            if start_new_session:
                os.setsid()
            os.chdir(cwd or ".")
            os.environ.clear()
            os.environ.update(env)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        run_and_exit(self.args[1:])


def run_and_exit(arguments: list[str]) -> NoReturn:
    """Run what follows `python` in a command line, and exit with its status."""
    status: Any = 0
    try:
        arguments = [argument for argument in arguments if argument != "-u"]
        is_module = arguments[0] == "-m"
        program, *flags = arguments[1:] if is_module else arguments
        sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.argv, sys.orig_argv = [program, *flags], [sys.executable, *arguments]
        if program == "torch.distributed.run":
            from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

            subprocess_handler.Popen = ForkedProcess  # type: ignore[misc]
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # it has been imported before
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(program).parent))
            runpy.run_path(program, run_name="__main__")
    except SystemExit as request:
        status = request.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)  # finalizing the interpreter would copy all memory that the processes share


def supervise(connection: socket.socket) -> NoReturn:
    """Run one job, send its exit status, and kill what is left of it when the test closes the connection."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    received, sent = connection.makefile("r"), connection.makefile("w")
    request = json.loads(received.readline())
    with open(request.pop("stdout"), "wb") as stdout, open(request.pop("stderr"), "wb") as stderr:
        job = ForkedProcess(**request, stdout=stdout, stderr=stderr)
    print(os.getpid(), job.pid, file=sent, flush=True)

    def wait() -> None:
        print(job.wait(), file=sent, flush=True)
        with suppress(ChildProcessError):
            while os.wait():  # as init does: nobody else waits for what the job has left behind
                pass

    threading.Thread(target=wait, daemon=True).start()
    received.readline()  # returns when the test closes the connection, or its process has ended
    while left := running_children(os.getpid()):
        for process in left:
            process.kill()
    os._exit(0)


def serve(name: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # when the tests end
    for module in IMPORTED:
        importlib.import_module(module)
    sys.modules["app.metrics.score"].load_metrics()  # imports `evaluate`
    # torchrun names the caller in events that nobody records, for which it searches all these modules for two seconds.
    rendezvous: Any = sys.modules["torch.distributed.elastic.rendezvous.dynamic_rendezvous"]
    rendezvous.get_method_name = str
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the memory that it shares with the server
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")
    listener.listen()
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            supervise(connection)
        connection.close()


if __name__ == "__main__":
    serve(sys.argv[1])
