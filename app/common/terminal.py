"""What a program does on a terminal: progress bars, and interruption by the user or the system."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def hides_progress(disable_tqdm: bool = False, is_main_process: bool = True) -> bool:
    """Return tqdm's `disable`: only one rank shows a bar, on a terminal. In a file, each update would be a line."""
    return disable_tqdm or not is_main_process or not sys.stderr.isatty()


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
