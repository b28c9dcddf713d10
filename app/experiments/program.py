"""What the programs that start jobs have in common: their exit statuses and their one-line errors."""

from __future__ import annotations

import argparse
import gc
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from app.errors import RunError, UserError, escape_unencodable_output
from app.interrupts import as_interrupt


def run_program(program: Callable[[], int]) -> int:
    """Call a program and return its exit status: its own, 2 after a mistake, 1 after a failed run, 130 if interrupted.

    Mistakes and failures are printed as one line without a traceback. SIGTERM and SIGHUP interrupt like Ctrl-C.
    """
    gc.freeze()  # see app/__init__.py
    escape_unencodable_output()
    try:
        with as_interrupt(signal.SIGTERM, signal.SIGHUP):
            return program()
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except RunError as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: every job that was started has ended", file=sys.stderr)
        return 130


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists every flag)")
