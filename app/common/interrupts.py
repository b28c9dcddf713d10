"""Turn terminating signals into an exception, so that cleanup code runs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def as_interrupt(*numbers: signal.Signals) -> Iterator[None]:
    """Raise `KeyboardInterrupt` for these signals inside the block, except for ignored ones, as SIGHUP under nohup."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    handled = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
