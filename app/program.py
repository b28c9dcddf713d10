"""Run programs and ranks: their exit statuses and their one-line errors."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import FrameType
from typing import NoReturn

from .cli import FLAGS_OF_ONE_RUN, OneLineParser, parse_flags, program_name
from .common.errors import RunError, UserError, escape_unencodable_output
from .common.terminal import as_interrupt, raise_on_interrupt
from .distributed.environment import (
    check_environment,
    drop_accelerate_variables,
    rank_and_sizes,
    split_off_local_rank,
    started_by_torchrun,
)
from .settings import Settings

SECONDS_OF_RANK_0 = 10.0  # that the other ranks give it to report a mistake which all of them have found


def stop_importing() -> None:
    """Exempt everything that has been imported from garbage collections, and enable them. Programs call it first.

    From now on, Ctrl-C raises `KeyboardInterrupt`.
    """
    gc.freeze()
    gc.enable()
    raise_on_interrupt()


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

    Ctrl-C ends the process with status 130.
    """
    stop_importing()
    _interrupt_only_once()
    escape_unencodable_output()
    try:
        if not started_by_torchrun() and not {"-h", "--help"} & set(sys.argv[1:]):
            raise UserError(f"start it with torchrun: torchrun --standalone --nproc_per_node=2 -m {program_name()}")
        _remove_local_rank()
        program()
    except UserError as problem:
        return print_mistake(problem, rank_and_sizes()[0])
    except KeyboardInterrupt:
        _exit_interrupted()
    return 0


def print_mistake(problem: UserError, rank: int) -> int:
    """Print a mistake of this rank as one line, and return the exit status.

    Most mistakes, such as an invalid flag, are made on every rank: rank 0 prints it and exits, and torchrun ends the
    other ranks while they wait here.
    """
    if rank != 0:
        time.sleep(SECONDS_OF_RANK_0)
    print(f"error: {problem}", file=sys.stderr, flush=True)
    return 2


def launch(
    main: Callable[..., None],
    description: str | None,
    add_arguments: Callable[[OneLineParser], None] | None = None,
    *,
    rejected: Mapping[str, str] = FLAGS_OF_ONE_RUN,
) -> NoReturn:
    """Run the entry point on this rank and exit. If the job fails, one rank prints one line.

    Exit statuses: 0 finished (or a restarted job found its run already finished), 1 the run failed, 2 invalid
    input, 75 preempted after saving a checkpoint, 130 interrupted by Ctrl-C before training.

    Args:
        main: Called with the settings of this rank, and with the program's own flags as keyword arguments. It joins the
            process group itself.
        description: The docstring of the entry point, for `--help`.
        add_arguments: As for `parse_given`.
        rejected: As for `parse_given`.
    """
    # Here, because `early` needs none of torch.
    from .distributed.failure import exit_without_handlers, report_failure_to_connect
    from .distributed.process_group import join

    stop_importing()
    _interrupt_only_once()
    escape_unencodable_output()
    try:
        check_environment()  # before the rank is read
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    rank = rank_and_sizes()[0]
    if rank != 0 and {"-h", "--help"} & set(sys.argv[1:]):
        sys.exit(0)  # rank 0 prints the help
    _remove_local_rank()
    if (names := drop_accelerate_variables()) and rank == 0:
        print(f"warning: the settings count, not {', '.join(names)} of accelerate launch", file=sys.stderr, flush=True)
    try:
        try:
            settings, own_flags = parse_flags(description, sys.argv[1:], add_arguments, rejected=rejected)
            settings = select_precision(settings)
        except UserError as problem:
            with join(Settings(use_cpu=True, threads=1), str(problem)):
                raise AssertionError("join raises the problem on all ranks") from problem
        # A tracker that hangs must not stop the exit, where its library waits for it.
        with exit_without_handlers() if rank == 0 and settings.report_to != "none" else nullcontext():
            main(settings, **own_flags)
    except KeyboardInterrupt:
        _exit_interrupted()
    except Exception as failure:  # before the process group was joined
        report_failure_to_connect(failure, rank)
    sys.exit(0)


def _remove_local_rank() -> None:
    """Remove the `--local-rank=N` that torch.distributed.launch adds to the command line."""
    sys.argv[1:], added = split_off_local_rank(sys.argv[1:])
    if added and rank_and_sizes()[0] == 0:
        print("warning: --local-rank is not needed: torchrun sets LOCAL_RANK instead", file=sys.stderr, flush=True)


def select_precision(settings: Settings) -> Settings:
    """Return the settings with the precision that `--precision auto` stands for on this rank's device."""
    if settings.precision != "auto":
        return settings
    from .common.machine import automatic_precision  # here: `early` needs none of torch

    return replace(settings, precision=automatic_precision(settings.use_cpu, rank_and_sizes()[2]))  # type: ignore[arg-type]


def _interrupt_only_once() -> None:
    """Ignore a second Ctrl-C: a rank gets it from the terminal, like all processes, and again from the launcher."""

    def interrupt(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)


def _exit_interrupted() -> NoReturn:
    if rank_and_sizes()[0] == 0:
        print("interrupted", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(130)  # not in order: the other ranks may be gone
