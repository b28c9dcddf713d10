"""What the programs that start jobs have in common: their exit statuses and their one-line errors."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable

from app import stop_importing
from app.cli import as_flags, program_name
from app.distributed.environment import rank_and_sizes, started_by_torchrun
from app.distributed.launcher import TorchrunJob, torchrun_command
from app.errors import RunError, UserError, escape_unencodable_output
from app.hardware import usable_cores
from app.interrupts import as_interrupt
from app.settings import Settings

SECONDS_OF_RANK_0 = 10.0  # that the other ranks give it to report a mistake which all of them have found


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


def run_rank(program: Callable[[], None]) -> int:
    """Call a program that torchrun starts on every rank, and return its exit status: 2 after a mistake, otherwise 0.

    A mistake is printed as one line. Most mistakes, such as an invalid flag, are made on every rank: rank 0 prints it
    and exits, and torchrun ends the other ranks while they wait here.
    """
    stop_importing()
    escape_unencodable_output()
    try:
        if not started_by_torchrun() and not {"-h", "--help"} & set(sys.argv[1:]):
            raise UserError(f"start it with torchrun: torchrun --standalone --nproc_per_node=2 -m {program_name()}")
        program()
    except UserError as problem:
        if rank_and_sizes()[0] != 0:
            time.sleep(SECONDS_OF_RANK_0)
        print(f"error: {problem}", file=sys.stderr, flush=True)
        return 2
    return 0


def run_job(module: str, settings: Settings, nproc_per_node: int) -> int:
    """Run an entry point under torchrun, which prints to this process's output, and return its exit status."""
    # If it is unset, torchrun prints a warning. The ranks set the same number themselves.
    threads = settings.threads or max(1, len(usable_cores()) // nproc_per_node)
    command = torchrun_command(module, as_flags(settings), nproc_per_node)
    with TorchrunJob(command, environment={"OMP_NUM_THREADS": str(threads)}) as job:
        return job.wait()
