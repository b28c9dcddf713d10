"""Being asked to stop: SIGTERM, SIGUSR1 (Slurm's `--signal`) or Ctrl-C to any rank stops all ranks after the same
step."""

from __future__ import annotations

import os
import signal
import threading
import time

import torch
import torch.distributed as dist

from app.distributed.world import World

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_REQUEST_SECONDS = 1.0  # Slurm and containers signal torchrun and its workers, and torchrun passes it on to them


class StopRequest:
    """Asks the ranks once a step whether any of them was told to stop.

    The question travels while the next step is computed: an asynchronous all-reduce of one integer over gloo, so that
    it delays neither CPU nor GPU. Its answer, and with it the stop, comes a step later, after the same step on every
    rank. A context: whoever is told to stop behind the last step comes to the end of the block, which is near.
    """

    def __init__(self, world: World) -> None:
        """Collective. From here on a signal is a request; a second one, a second later, ends the process at once.

        Args:
            timeout: how long to wait for the other ranks' answers.
        """
        self.received = False
        # A group of its own does not inherit the default group's timeout: unset, it would be half an hour.
        self.group = dist.new_group(backend="gloo", timeout=world.timeout)
        self.asked: tuple[torch.Tensor, dist.Work] | None = None
        # Python runs a signal's handler in the main thread only, which may wait long in a collective for a rank that
        # hangs. A byte with the signal's number comes down this pipe at once.
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        self.before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        threading.Thread(target=self._listen, daemon=True).start()

    def agreed(self) -> bool:
        """Whether some rank had been told to stop when this was called last. To be called by every rank after each
        step."""
        answer = False
        if self.asked is not None:
            flag, work = self.asked
            work.wait()
            answer = bool(flag)
        flag = torch.tensor(int(self.received))
        self.asked = (flag, dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group, async_op=True))
        return answer

    def __enter__(self) -> StopRequest:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        """Signals do again what they did before; but not for a rank that fails, whose line has to come out first."""
        if failure is not None:
            return
        if self.asked is not None:
            self.asked[1].wait()
            self.asked = None
        for number, handler in self.before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        os.close(self.writer)  # ends the thread

    def _listen(self) -> None:
        first = None
        while number := os.read(self.reader, 1):
            first = first or time.monotonic()
            self.received = True
            if time.monotonic() - first > SAME_REQUEST_SECONDS:
                os._exit(128 + number[0])
        os.close(self.reader)
