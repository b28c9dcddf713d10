"""Run programs and ranks: their exit statuses and their one-line errors."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from .cli import CommandLine
from .common.errors import RunError, UserError, escape_unencodable_output
from .common.files import check_exists
from .common.terminal import as_interrupt
from .distributed.environment import SINGLE_PROCESS, rank_and_sizes, started_by_torchrun
from .settings import Settings


class Program(CommandLine):
    """An entry point: it checks its command line before it imports torch, and `launch` runs it on each rank."""

    def check_command_line(self) -> None:
        """Print `--help`, or a mistake in the command line, and exit. Entry points call it before they import torch.

        Importing torch and transformers takes seconds. `launch` parses the command line again.
        """
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if it is ignored
            signal.signal(signal.SIGINT, lambda *_: _exit_interrupted())  # no traceback of the imports
        # Imports create a million objects, but hardly any garbage: collections are enabled by `stop_importing`.
        gc.disable()
        # A thread that waits for another one would use its core up to the end of its time slice, which other programs,
        # or even the thread that it waits for, have to wait for. OpenMP reads the variable when torch is imported.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        escape_unencodable_output()
        # torch.distributed.launch adds it. torchrun sets LOCAL_RANK instead.
        sys.argv[1:] = [flag for flag in sys.argv[1:] if not flag.startswith("--local-rank=")]
        wants_help = any(flag.startswith(("-h", "--help")) for flag in sys.argv[1:])
        try:
            check_libraries()
            rank, size, _, local_size = rank_and_sizes()
            if wants_help and rank != 0:
                sys.exit(0)  # rank 0 prints the help
            # The ranks of one node read the same files: rank 0 reports a mistake and exits, and torchrun ends the
            # others while they import torch. Another node's files may differ. All ranks then have to learn of a
            # mistake, so `launch` connects them first.
            if wants_help or (rank == 0 and size == local_size):
                settings, _ = self.parse(sys.argv[1:])
                check_files(settings)
        except UserError as problem:
            print(f"error: {problem}", file=sys.stderr, flush=True)
            sys.exit(2)

    def launch(self, main: Callable[..., None]) -> NoReturn:
        """Run the entry point on this rank and exit. If the job fails, one rank prints one line.

        Exit statuses: 0 finished (or a restarted job found its run already finished), 1 the run failed, 2 invalid
        input, 75 preempted after saving a checkpoint, 130 interrupted by Ctrl-C before training.

        Args:
            main: Called with the settings of this rank, and with the program's own flags as keyword arguments. It joins
                the process group itself.
        """
        # Here, because `check_command_line` needs none of torch.
        import torch.distributed as dist

        from .distributed.failure import exit_now, report_failure_to_connect
        from .distributed.process_group import join

        stop_importing()
        if not started_by_torchrun():
            os.environ.update(SINGLE_PROCESS)
            tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")  # set by srun
            if tasks != "1" and os.environ.get("SLURM_PROCID") == "0":
                advice = f"srun has started {tasks} tasks, but without torchrun each trains for itself: see slurm.sh"
                print(f"warning: {advice}", file=sys.stderr, flush=True)
        rank, status = rank_and_sizes()[0], 0
        # Trainer and accelerate read them and the hand-written loop does not, so the two paths would train differently.
        names = [name for name in os.environ if name.startswith("ACCELERATE_")]
        for name in names:
            del os.environ[name]
        if names and rank == 0:
            print(f"warning: the settings count, not accelerate's {', '.join(names)}", file=sys.stderr, flush=True)
        try:
            settings, own_flags = self.parse(sys.argv[1:])
            main(select_precision(settings), **own_flags)
        except SystemExit as outcome:
            # Not after this clause: it would free the frames of the exception, and with them process groups that have
            # been destroyed, whose destructor can wait forever for a thread that needs the GIL.
            exit_now(int(outcome.code or 0))
        except KeyboardInterrupt:
            _exit_interrupted()
        except UserError as problem:  # most are made on every rank, and one rank prints it
            if dist.is_initialized():  # by app.minimal
                dist.destroy_process_group()
            with suppress(SystemExit), join(Settings(use_cpu=True, threads=1), str(problem)):
                raise AssertionError("join raises the problem on all ranks") from problem
            status = 2
        except Exception as failure:  # before the process group was joined
            report_failure_to_connect(failure, rank)
        exit_now(status)  # without exit handlers, in which the library of a tracker may wait forever


def check_libraries() -> None:
    """Raise UserError if a file in the current folder would be imported in place of a library."""
    for name in ("accelerate", "datasets", "evaluate", "tokenizers", "torch", "transformers"):
        spec = find_spec(name)
        if spec is not None and spec.origin is not None and Path(spec.origin).parent == Path.cwd():
            raise UserError(f"{spec.origin}: would be imported in place of the library {name}: rename it")


def check_files(settings: Settings) -> None:
    """Raise UserError if a file of reviews does not exist."""
    # Resuming a finished run must report that it is finished, even if its reviews no longer exist.
    if settings.resume_from_checkpoint is None:
        for path in (settings.csv, settings.validation_file, settings.test_file):
            if path is not None:
                check_exists(Path(path))


def stop_importing() -> None:
    """Exempt everything that has been imported from garbage collections, and let Ctrl-C raise `KeyboardInterrupt`."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # a training step creates many objects and hardly any garbage
    gc.enable()
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run_program(program: Callable[[], int | None]) -> int:
    """Call a program and return its exit status: its own, 2 after a mistake, 1 after a failed run, 130 if interrupted.

    Mistakes and failures are printed as one line without a traceback. SIGTERM and SIGHUP interrupt like Ctrl-C.
    """
    stop_importing()
    escape_unencodable_output()
    try:
        with as_interrupt(signal.SIGTERM, signal.SIGHUP):
            return program() or 0
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except RunError as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: every job that was started has ended", file=sys.stderr)
        return 130


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
