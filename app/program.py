"""What the programs that start jobs have in common: their exit statuses and their one-line errors."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from app import stop_importing
from app.cli import as_flags
from app.distributed.launcher import TorchrunJob, torchrun_command
from app.errors import RunError, UserError, escape_unencodable_output
from app.hardware import usable_cores
from app.interrupts import as_interrupt
from app.settings import Settings


def run_program(program: Callable[[], int]) -> int:
    """Call a program and return its exit status: its own, 2 after a mistake, 1 after a failed run, 130 if interrupted.

    Mistakes and failures are printed as one line without a traceback. SIGTERM and SIGHUP interrupt like Ctrl-C.
    """
    stop_importing()
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


def run_job(module: str, settings: Settings, nproc_per_node: int) -> int:
    """Run an entry point under torchrun, which prints to this process's output, and return its exit status."""
    # If it is unset, torchrun prints a warning. The ranks set the same number themselves.
    threads = settings.threads or max(1, len(usable_cores()) // nproc_per_node)
    command = torchrun_command(module, as_flags(settings), nproc_per_node)
    with TorchrunJob(command, environment={"OMP_NUM_THREADS": str(threads)}) as job:
        return job.wait()
