"""Run torchrun's agent, which starts the ranks of this machine, in this process: `run_agent`.

Unlike torchrun, it exits with the ranks' status, passes signals on to the ranks, and prints at most one line.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress
from types import FrameType

import psutil
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError
from torch.distributed.run import parse_args, run

from ..common.errors import RunError, UserError, shorten

RANK_STATUSES = (1, 2, 75, 130)  # see program.launch
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
UNRESPONSIVE_SECONDS = 1.0  # after which the main thread is considered to wait in C++
CLEANUP_SECONDS = 10.0  # for torchrun, after the ranks have ended


class JobEnded(BaseException):
    """The ranks have ended after a signal. Raised in the handler, so that torchrun does not restart them."""


def run_agent(command: Sequence[str]) -> int:
    """Run torchrun's agent with this command line, without its own output. Return the ranks' exit status.

    Raises:
        UserError: torchrun rejects its flags.
        RunError: the other nodes cannot be reached.
    """
    if "LOGLEVEL" not in os.environ:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed."):  # each of torchrun's loggers has a level of its own
                logging.getLogger(name).setLevel(logging.CRITICAL)
    options = parse(command)
    with SignalForwarder() as forwarder:
        try:
            run(options)
        except ChildFailedError as failure:
            status = failure.get_first_failure()[1].exitcode
            return status if status in RANK_STATUSES else 1
        except JobEnded:
            assert forwarder.status is not None
            return forwarder.status
        except RendezvousTimeoutError:
            raise RunError("no contact with the other nodes: not all have connected in time") from None
        except (dist.DistError, RendezvousError) as failure:
            raise RunError(f"no contact with the other nodes: {one_line(failure.__cause__ or failure)}") from None
        except (ValueError, AssertionError, ImportError) as problem:
            # torchrun checks its flags before it starts the ranks, some of them only when it connects.
            raise UserError(f"torchrun rejects its flags: {one_line(problem)}") from None
    return 0


def parse(command: Sequence[str]) -> Namespace:
    """Parse torchrun's command line and its environment variables, such as PET_MAX_RESTARTS."""
    usage = io.StringIO()
    try:
        with redirect_stderr(usage):
            options: Namespace = parse_args(list(command))
    except SystemExit:
        raise UserError(f"torchrun rejects its flags: {usage.getvalue().splitlines()[-1]}") from None
    return options


def one_line(problem: BaseException) -> str:
    return shorten(" ".join(str(problem).split()), 300) or type(problem).__name__


class SignalForwarder:
    """Pass signals on to the ranks, which save a checkpoint, wait for them, and end the job. A context manager.

    Attributes:
        status: the status of a job that a signal has ended, otherwise None.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self.handler_has_run = threading.Event()

    def __enter__(self) -> SignalForwarder:
        # Python runs a handler in the main thread only, which may wait in C++ for the other nodes, for many minutes.
        # The signal's number arrives through this pipe at once.
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=[reader], daemon=True).start()
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
                signal.signal(number, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        for number in SIGNALS:  # the job has its status, and the process exits next
            signal.signal(number, signal.SIG_IGN)

    def _forward(self, number: int, _: FrameType | None) -> None:
        self.handler_has_run.set()
        if self.status is not None:  # torchrun cleans up after an earlier signal
            return
        ranks = ranks_of_this_process()
        for process in ranks:
            with suppress(psutil.NoSuchProcess):  # it has just ended
                # To a rank, SIGHUP is no request to stop.
                process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
        statuses = [process.wait() for process in ranks]  # another signal is forwarded meanwhile
        known = [status for status in statuses if status in RANK_STATUSES]
        if ranks and all(status == 0 for status in statuses):
            self.status = 0  # the signal came after the last step
        else:
            # A rank that ends with 75 has saved a checkpoint together with all others, even if one has failed since.
            self.status = max(known, default=130)
            if not known:  # no rank has printed anything
                print("interrupted", file=sys.stderr, flush=True)
        # torchrun's clean-up may wait for nodes that cannot be reached.
        limit = threading.Timer(CLEANUP_SECONDS, os._exit, [self.status])
        limit.daemon = True
        limit.start()
        raise JobEnded

    def _watch(self, reader: int) -> None:
        """End the process if a signal arrives while there are no ranks and the main thread waits in C++."""
        while number := os.read(reader, 1):
            if number[0] not in SIGNALS or self.handler_has_run.wait(UNRESPONSIVE_SECONDS):
                continue
            if self.status is None and not ranks_of_this_process():
                print("interrupted", file=sys.stderr, flush=True)
                os._exit(130)


def ranks_of_this_process() -> list[psutil.Process]:
    """Return the ranks among this process's children, including those that have just ended."""
    return [process for process in psutil.Process().children() if _is_rank(process)]


def _is_rank(process: psutil.Process) -> bool:
    try:
        return "-m" in process.cmdline()  # unlike helper processes
    except psutil.ZombieProcess:  # has no command line; its status counts
        return True
    except psutil.NoSuchProcess:
        return False
