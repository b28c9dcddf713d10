"""Report a failure in one line, from one rank, whatever state the other ranks are in.

There are two kinds. Errors that every rank raises at the same place (a user's mistake, a stop request, a non-finite
loss) are printed by rank 0, and all ranks exit in order. Any other error belongs to one rank: its peers then lose
contact, find out which ranks are missing, and exit without waiting for anyone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from ..common.errors import (
    AgreedError,
    AlreadyFinished,
    Preempted,
    RunError,
    UserError,
    escape_control_characters,
    raised_by_model,
)
from .rendezvous import wait_for_keys
from .world import World

ON_ALL_RANKS = (AgreedError, Preempted, AlreadyFinished, RunError)  # raised by every rank at the same place
STATUS_TIMEOUT_SECONDS = 3.0
# torch has no class for gloo's errors: they are RuntimeErrors that begin with the place in gloo's sources, or with one
# of these texts. Anchored, so that a path in another message cannot match.
LOST_CONTACT = re.compile(
    r"\[[^\[\]]*\bgloo/(transport|rendezvous)/[\w/]+\.(cc|h):\d+\] |Gloo connectFullMesh failed with "
    r"|Application timeout caused pair closure|NCCL [Ee]rror|NCCL communicator was aborted"
)


def exit_line(problem: Exception) -> tuple[str, int]:
    """Return the line to print for an error that all ranks have raised, and the exit status."""
    if isinstance(problem, Preempted):
        return f"stopped: {problem}", 75
    if isinstance(problem, AlreadyFinished):
        return str(problem), 0
    if isinstance(problem, RunError):
        note = _note(problem)
        return f"error: {problem}" + (f" ({note})" if note else ""), 1
    return f"error: {problem}", 2


def report_failure(problem: Exception, world: World) -> NoReturn:
    """Print one line for a failure of this rank, or for losing contact with others, and exit with status 1.

    If contact was lost, the lowest surviving rank prints which ranks are missing, unless a rank has reported the cause.
    """
    cause, note = _prepare_report(problem), _note(problem) or "before training"
    if not is_lost_contact(problem):
        _exchange_status("own cause", world, wait=False)
        reason = _reason_outside_program(problem)
        # Such a reason often applies to every rank, with other numbers in the text.
        if _is_first_to_report(reason or cause, world):
            if not (reason or isinstance(problem, OSError)):
                traceback.print_exception(problem)
            where = f"{reason}: " if reason else ""
            print(f"error: rank {world.rank} failed {note}: {where}{cause}", file=sys.stderr, flush=True)
    else:
        statuses = _exchange_status("lost contact", world, wait=True)
        missing = [rank for rank, status in enumerate(statuses) if status is None]
        if "own cause" not in statuses and statuses.index("lost contact") == world.rank:
            who = f"lost contact with rank(s) {', '.join(map(str, missing))}" if missing else f"lost contact: {cause}"
            print(f"error: rank {world.rank} {who}, {note}", file=sys.stderr, flush=True)
    exit_now(1)


def report_failure_to_connect(problem: Exception, rank: int) -> NoReturn:
    """Print one line for a failure that precedes the process group, and exit with status 1."""
    cause = _prepare_report(problem)
    if isinstance(problem, RunError):
        line = str(problem)
    elif is_lost_contact(problem):
        line = f"rank {rank} could not connect to the other ranks: {cause}"
    else:
        traceback.print_exception(problem)
        line = f"rank {rank} failed at startup: {cause}"
    print(f"error: {line}", file=sys.stderr, flush=True)
    exit_now(1)


def _prepare_report(problem: Exception) -> str:
    """Write torchrun's error file, and return the cause as one line."""
    ShortErrorHandler().record_exception(problem)
    # torchrun sends SIGTERM when the first rank exits: our line has to be printed first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return escape_control_characters(" ".join(str(problem).split())) or type(problem).__name__


def _reason_outside_program(problem: BaseException) -> str | None:
    """Return the cause of a failure that is no defect of this program: a traceback would not help. Otherwise None."""
    if isinstance(problem, torch.OutOfMemoryError):  # first, because most memory is allocated in the model's code
        return "try more --gradient_accumulation_steps, --activation_checkpointing or a smaller --eval_batch_size"
    # Such as a length that the model does not support.
    return "in the model's own code" if raised_by_model(problem) else None


def _note(problem: Exception) -> str | None:
    """Return the step in which the exception was raised: the note that `RunRecord` has added."""
    notes = getattr(problem, "__notes__", [])
    return escape_control_characters(notes[-1]) if notes else None


def is_lost_contact(problem: Exception) -> bool:
    """Tell whether an exception means that another rank cannot be reached, rather than that this rank has failed."""
    if isinstance(problem, dist.DistError):
        return True
    return isinstance(problem, RuntimeError) and LOST_CONTACT.match(str(problem)) is not None


def _exchange_status(status: str, world: World, wait: bool) -> list[str | None]:
    """Publish this rank's status in the store and read the others'; None for a rank that has published none."""
    statuses: list[str | None] = [None] * world.size
    statuses[world.rank] = status

    def exchange() -> None:
        world.store.set(f"failure/{world.rank}", status)
        for rank in range(world.size) if wait else ():
            with suppress(RuntimeError):
                if wait_for_keys(world.store, [f"failure/{rank}"], timedelta(seconds=STATUS_TIMEOUT_SECONDS)):
                    statuses[rank] = world.store.get(f"failure/{rank}").decode()

    _call_store(exchange, STATUS_TIMEOUT_SECONDS * (1 + world.size) if wait else STATUS_TIMEOUT_SECONDS)
    return list(statuses)


def _is_first_to_report(cause: str, world: World) -> bool:
    """Tell whether no other rank has reported this cause. True if the store does not answer."""
    reports: list[int] = []
    key = f"cause/{hashlib.sha256(cause.encode()).hexdigest()}"
    _call_store(lambda: reports.append(world.store.add(key, 1)), STATUS_TIMEOUT_SECONDS)
    return reports in ([], [1])


def _call_store(function: Callable[[], None], seconds: float) -> None:
    """Call a function that uses the store. Do not wait longer: the rank that hosts the store may be unreachable."""

    def call() -> None:
        with suppress(RuntimeError):
            function()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)


class ShortErrorHandler(ErrorHandler):
    """Write the file from which torchrun prints its summary: one line for an expected error, or a traceback."""

    def record_exception(self, e: BaseException) -> None:
        path = self._get_error_file_path()
        if path and (isinstance(e, (UserError, *ON_ALL_RANKS)) or _reason_outside_program(e)):
            self._write_error_file(path, json.dumps({"message": f"error: {e}", "timestamp": int(time.time())}))
        else:
            super().record_exception(e)


@contextmanager
def exit_without_handlers() -> Iterator[None]:
    """End the process after the block, with the status that the block exits with, without calling atexit handlers."""
    status = 0
    try:
        yield
    except SystemExit as outcome:
        status = int(outcome.code or 0)
    exit_now(status)


def exit_now(status: int) -> NoReturn:
    """Exit without waiting for the other ranks, which may be gone: a failed rank must not hang while it cleans up."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
