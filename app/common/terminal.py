"""What a program does on a terminal: progress bars, and interruption by the user or the system."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def hides_progress(disable_tqdm: bool = False, is_main_process: bool = True) -> bool:
    """Return tqdm's `disable`: only one rank shows a bar, on a terminal. In a file, each update would be a line."""
    return disable_tqdm or not is_main_process or not sys.stderr.isatty()


def has_piped_input() -> bool:
    """Tell whether standard input is a file or a pipe: nobody types there."""
    return sys.stdin is not None and not sys.stdin.isatty()


def prints_to_terminal() -> bool:
    """Tell whether standard output is a terminal, where control characters would take effect."""
    return sys.stdout.isatty()


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


def exit_on_interrupt() -> None:
    """End the process at Ctrl-C until `raise_on_interrupt`: a traceback of the imports would help nobody."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if it is ignored
        signal.signal(signal.SIGINT, _interrupted)


def raise_on_interrupt() -> None:
    """Raise `KeyboardInterrupt` at Ctrl-C again."""
    if signal.getsignal(signal.SIGINT) is _interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupted(*_: object) -> None:
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"interrupted\n")
    os._exit(130)
