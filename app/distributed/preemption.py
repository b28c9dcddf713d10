"""Stop requests: SIGTERM, SIGUSR1 (Slurm's `--signal`) or Ctrl-C on any rank stops all ranks after the same step."""

from __future__ import annotations

import os
import signal
import threading
import time

import torch
import torch.distributed as dist

from .world import World

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
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
        self.received = False
        self.pending: tuple[torch.Tensor, dist.Work] | None = None

    def __enter__(self) -> StopRequest:
        """Treat signals as stop requests from now on. Collective.

        Another signal more than `SAME_REQUEST_SECONDS` after the first one ends the process at once.
        """
        # A new group does not inherit the default group's timeout; without one, it would be half an hour.
        self.group = dist.new_group(backend="gloo", timeout=self.world.timeout)
        # Python runs a signal handler only in the main thread, which may be waiting in a collective for a rank that
        # hangs. The signal's number arrives through this pipe at once.
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()
        return self

    def requested(self) -> bool:
        """Tell whether any rank had been asked to stop at the previous call. Collective; call it after each step."""
        answer = False
        if self.pending is not None:
            flag, work = self.pending
            work.wait()
            answer = bool(flag)
        flag = torch.tensor(int(self.received))
        self.pending = (flag, dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group, async_op=True))
        return answer

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        """Replace the signal handlers, but not on a rank that fails: its error line has to be printed first."""
        if failure is not None:
            return
        if self.pending is not None:
            self.pending[1].wait()
            self.pending = None
        signal.set_wakeup_fd(-1)
        os.close(self.writer)  # ends the thread
        # The thread refers to the process group. If it released the group during interpreter exit, the process would
        # abort.
        self.listener.join()
        for number in SIGNALS:
            # Leaving the process group takes a moment, in which a signal must not end a run that has finished.
            signal.signal(number, signal.SIG_IGN)

    def _listen(self) -> None:
        first = None
        while number := os.read(self.reader, 1):
            if number[0] not in SIGNALS:  # the pipe gets all signals that this process handles
                continue
            first = first or time.monotonic()
            self.received = True
            if time.monotonic() - first > SAME_REQUEST_SECONDS:
                os._exit(128 + number[0])
        os.close(self.reader)
