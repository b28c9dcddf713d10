"""Run torchrun's agent, which starts the ranks of this machine, in this process: `run_agent`.

Unlike torchrun, it exits with the ranks' status, passes signals on to the ranks, and prints at most one line.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import NoReturn

import psutil
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import parse_args, parse_min_max_nnodes, run

from ..common.errors import RunError, UserError, shorten
from .preemption import SAME_REQUEST_SECONDS, SIGNALS

RANK_STATUSES = (1, 2, 75, 130)  # see program.launch


def run_agent(command: Sequence[str]) -> int:
    """Run torchrun's agent with this command line, without its own output. Return the ranks' exit status.

    Raises:
        UserError: torchrun rejects its flags.
        RunError: the other nodes cannot be reached.
    """
    if "LOGLEVEL" not in os.environ:
        logging.disable()  # all of this process's messages are torchrun's
    options = parse_args(list(command))  # and environment variables, such as PET_MAX_RESTARTS
    forward_signals()
    try:
        if parse_min_max_nnodes(options.nnodes)[1] > 1:
            # Each attempt of a c10d job gets a new store. A node that rejoins does not find torchrun's own.
            os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        run(options)
    except ChildFailedError as failure:
        status = failure.get_first_failure()[1].exitcode
        return status if status in RANK_STATUSES else 1
    except (dist.DistError, RendezvousError) as failure:
        raise RunError(f"no contact with the other nodes: {one_line(failure.__cause__ or failure)}") from None
    except (ValueError, AssertionError, ImportError) as problem:
        # torchrun checks its flags before it starts the ranks, some of them only when it connects.
        raise UserError(f"torchrun rejects its flags: {one_line(problem)}") from None
    return 0


def one_line(problem: BaseException) -> str:
    return shorten(" ".join(str(problem).split()), 300) or type(problem).__name__


def forward_signals() -> None:
    """Pass signals on to the ranks, which save a checkpoint, and end this process with their status.

    A second request, such as another Ctrl-C, kills the ranks.
    """

    def forward(number: int, _: FrameType | None) -> None:
        ranks = psutil.Process().children()
        if not ranks:
            return  # `listen` exits
        for process in ranks:
            process.send_signal(number)
        statuses = [process.wait() for process in ranks]  # another signal is forwarded meanwhile
        if all(status == 0 for status in statuses):  # the signal came after the last step
            os._exit(0)
        # A rank that ends with 75 has saved a checkpoint together with all others, even if one has failed since.
        # The process ends here: torchrun would restart the ranks, or wait for nodes that cannot be reached.
        known = [status for status in statuses if status in RANK_STATUSES]
        os._exit(max(known) if known else exit_interrupted())

    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
            signal.signal(number, forward)
    # Python runs a handler in the main thread only, which may wait in C++ for the other nodes, for many minutes. The
    # signal's number arrives through this pipe at once.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def listen() -> None:
        first = math.inf
        while os.read(reader, 1):
            first = min(first, time.monotonic())
            ranks = psutil.Process().children()
            if not ranks:
                exit_interrupted()
            if time.monotonic() - first > SAME_REQUEST_SECONDS:  # a person insists: a rank may wait for one that hangs
                for process in ranks:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()

    threading.Thread(target=listen, daemon=True).start()


def exit_interrupted() -> NoReturn:
    """Exit after a signal that no rank has reported."""
    os.write(sys.stderr.fileno(), b"interrupted\n")
    os._exit(130)
