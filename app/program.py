"""Run programs and ranks: their exit statuses and their one-line errors."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from .cli import OneLineParser, parse_flags, program_name
from .common.errors import RunError, UserError, escape_unencodable_output
from .common.files import check_exists
from .common.terminal import as_interrupt
from .distributed.environment import (
    check_environment,
    drop_accelerate_variables,
    rank_and_sizes,
    split_off_local_rank,
    started_by_torchrun,
)
from .settings import TYPES, Settings

SECONDS_OF_RANK_0 = 10.0  # that the other ranks give it to report a mistake which all of them have found


def check_command_line(
    description: str | None,
    add_arguments: Callable[[OneLineParser], None] | None = None,
    *,
    only: Collection[str] = TYPES,
) -> None:
    """Print `--help`, or a mistake in the command line, and exit. Entry points call it before they import torch.

    Importing torch and transformers takes seconds. `launch` parses the command line again.

    Args:
        description: The docstring of the entry point, for `--help`.
        add_arguments, only: As for `parse_given`.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if it is ignored
        signal.signal(signal.SIGINT, lambda *_: _exit_interrupted())  # no traceback of the imports
    # Imports create a million objects, but hardly any garbage: collections are enabled by `stop_importing`.
    gc.disable()
    gc.set_threshold(20_000, 20, 20)
    # A thread that waits for another one would use its core up to the end of its time slice, which other programs, or
    # even the thread that it waits for, have to wait for. OpenMP reads the variable when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    escape_unencodable_output()
    rank, wants_help = 0, bool({"-h", "--help"} & set(sys.argv[1:]))
    try:
        check_environment()
        rank, size, _, local_size = rank_and_sizes()
        if wants_help and rank != 0:
            sys.exit(0)  # rank 0 prints the help
        # The ranks of one node read the same files, but another node's may differ. All ranks then have to learn of a
        # mistake, so `launch` connects them first.
        if wants_help or size == local_size:
            settings, _ = parse_flags(description, split_off_local_rank(sys.argv[1:])[0], add_arguments, only=only)
            check_files(settings)
    except UserError as problem:
        sys.exit(print_mistake(problem, rank))


def check_files(settings: Settings) -> None:
    """Check that the files of reviews exist.

    Raises:
        UserError: there is no such file.
    """
    # Resuming a finished run must report that it is finished, even if its reviews no longer exist.
    if settings.resume_from_checkpoint is None:
        for path in (settings.csv, settings.validation_file, settings.test_file):
            if path is not None:
                check_exists(Path(path))


def stop_importing(*, is_rank: bool) -> None:
    """Exempt everything that has been imported from garbage collections, and let Ctrl-C raise `KeyboardInterrupt`.

    Args:
        is_rank: A rank gets Ctrl-C from the terminal, like all processes, and again from the launcher. So it ignores
            the second one.
    """

    def interrupt(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    gc.freeze()
    gc.enable()
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt if is_rank else signal.default_int_handler)


def run_program(program: Callable[[], int | None], *, on_ranks: bool = False) -> int:
    """Call a program and return its exit status: its own, 2 after a mistake, 1 after a failed run, 130 if interrupted.

    Mistakes and failures are printed as one line without a traceback.

    Args:
        on_ranks: Whether torchrun starts the program on every rank. Otherwise SIGTERM and SIGHUP interrupt like Ctrl-C.
    """
    stop_importing(is_rank=on_ranks)
    escape_unencodable_output()
    try:
        if on_ranks and not started_by_torchrun():
            raise UserError(f"start it with torchrun: torchrun --standalone --nproc_per_node=2 -m {program_name()}")
        with nullcontext() if on_ranks else as_interrupt(signal.SIGTERM, signal.SIGHUP):
            return program() or 0
    except UserError as problem:
        return print_mistake(problem, rank_and_sizes()[0] if on_ranks else 0)
    except RunError as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if on_ranks:
            _exit_interrupted()
        print("interrupted: every job that was started has ended", file=sys.stderr)
        return 130


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
    only: Collection[str] = TYPES,
) -> NoReturn:
    """Run the entry point on this rank and exit. If the job fails, one rank prints one line.

    Exit statuses: 0 finished (or a restarted job found its run already finished), 1 the run failed, 2 invalid
    input, 75 preempted after saving a checkpoint, 130 interrupted by Ctrl-C before training.

    Args:
        main: Called with the settings of this rank, and with the program's own flags as keyword arguments. It joins the
            process group itself.
        description: The docstring of the entry point, for `--help`.
        add_arguments, only: As for `parse_given`.
    """
    # Here, because `check_command_line` needs none of torch.
    from .distributed.failure import exit_without_handlers, report_failure_to_connect
    from .distributed.process_group import join

    stop_importing(is_rank=True)
    escape_unencodable_output()
    try:
        check_environment()  # before the rank is read
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    rank = rank_and_sizes()[0]
    sys.argv[1:], added = split_off_local_rank(sys.argv[1:])
    if added and rank == 0:
        print("warning: --local-rank is not needed: torchrun sets LOCAL_RANK instead", file=sys.stderr, flush=True)
    if (names := drop_accelerate_variables()) and rank == 0:
        print(f"warning: the settings count, not {', '.join(names)} of accelerate launch", file=sys.stderr, flush=True)
    try:
        try:
            settings, own_flags = parse_flags(description, sys.argv[1:], add_arguments, only=only)
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


def select_precision(settings: Settings) -> Settings:
    """Return the settings with the precision that `--precision auto` stands for on this rank's device."""
    if settings.precision != "auto":
        return settings
    from .common.machine import automatic_precision  # here, because it imports torch

    return replace(settings, precision=automatic_precision(settings.use_cpu, rank_and_sizes()[2]))  # type: ignore[arg-type]


def _exit_interrupted() -> NoReturn:
    if rank_and_sizes()[0] == 0:
        print("interrupted", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(130)  # not in order: the other ranks may be gone
