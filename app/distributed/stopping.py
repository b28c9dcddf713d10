"""Being asked to stop: SIGTERM, SIGUSR1 (Slurm's `--signal`) or Ctrl-C to any rank stops all ranks after the same
step."""

from __future__ import annotations

import os
import signal
from types import FrameType

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Asks the ranks once a step whether any of them was told to stop.

    The question travels while the next step is computed: an asynchronous all-reduce of one integer over gloo, so that
    it delays neither CPU nor GPU. Its answer, and with it the stop, comes a step later, after the same step on every
    rank.
    """

    def __init__(self) -> None:
        """Collective. From here on a signal is a request; a second one ends the process at once."""
        self.received: int | None = None
        self.group = dist.new_group(backend="gloo")
        self.before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        self.asked: tuple[torch.Tensor, dist.Work] | None = None

    def agreed(self) -> bool:
        """Whether some rank had been told to stop when this was called last. To be called by every rank after each
        step."""
        answer = False
        if self.asked is not None:
            flag, work = self.asked
            work.wait()
            answer = bool(flag)
        flag = torch.tensor(int(self.received is not None))
        self.asked = (flag, dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group, async_op=True))
        return answer

    def close(self) -> None:
        """Collective. Signals do again what they did before."""
        if self.asked is not None:
            self.asked[1].wait()
            self.asked = None
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = number
