"""Stop requests: any of SIGNALS on any rank stops all ranks after the same step.

SIGUSR1 is Slurm's `--signal`, SIGINT is Ctrl-C, and SIGHUP is the end of an ssh session.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

import torch
import torch.distributed as dist

from .world import World

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
SAME_REQUEST_SECONDS = 1.0  # Slurm and containers signal torchrun and its workers, and torchrun forwards it to them


class StopRequest:
    """Check once per step whether any rank has been asked to stop.

    The check is an asynchronous all-reduce of one integer over gloo. It runs while the next step is computed, so it
    delays neither CPU nor GPU. Its result is read one step later, so that all ranks stop after the same step.

    Use as a context manager. A request that arrives after the last step is ignored, and the run finishes. The signals
    remain ignored afterwards, because the process exits next.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.received: float | None = None  # when this rank was asked first
        self.pending: tuple[torch.Tensor, dist.Work] | None = None

    def __enter__(self) -> StopRequest:
        """Treat signals as stop requests from now on.

        Another signal more than `SAME_REQUEST_SECONDS` after the first one ends the process, unless it waits for a rank
        that hangs: Python runs handlers only between its own instructions. Then the launcher kills it.
        """
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._receive)
        return self

    def requested(self) -> bool:
        """Tell whether any rank had been asked to stop at the previous call. Collective; call it after each step."""
        answer = False
        if self.pending is not None:
            flag, work = self.pending
            work.wait()
            answer = bool(flag)
        flag, group = torch.tensor(int(self.received is not None)), self.world.control_group
        self.pending = (flag, dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group, async_op=True))
        return answer

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        """Replace the signal handlers, but not on a rank that fails: its error line has to be printed first."""
        if failure is not None:
            return
        if self.pending is not None:
            self.pending[1].wait()
        for number in SIGNALS:
            # Leaving the process group takes a moment, in which a signal must not end a run that has finished.
            signal.signal(number, signal.SIG_IGN)

    def _receive(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        self.received = self.received or now
        if now - self.received > SAME_REQUEST_SECONDS:
            os._exit(128 + number)
