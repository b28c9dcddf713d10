"""Report a failure in one line, from one rank, whatever state the other ranks are in.

There are two kinds. Errors that every rank raises at the same place (a user's mistake, a stop request, a non-finite
loss) are printed by rank 0, and all ranks exit in order. Any other error belongs to one rank: its peers then lose
contact, find out which ranks are missing, and exit without waiting for anyone.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import traceback
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from ..common.errors import (
    AgreedError,
    AlreadyFinished,
    Preempted,
    RunError,
    escape_control_characters,
    raised_by_model,
)
from .world import World

# Errors that every rank raises at the same place: how the line of rank 0 begins, and the exit status.
OUTCOMES: dict[type[Exception], tuple[str, int]] = {
    **{AgreedError: ("error: ", 2), RunError: ("error: ", 1)},
    **{Preempted: ("stopped: ", 75), AlreadyFinished: ("", 0)},
}
ANSWER_SECONDS = 3.0  # after which a rank that has not reported that it fails, too, counts as missing
OUT_OF_MEMORY = "try more --gradient_accumulation_steps, --activation_checkpointing or a smaller --eval_batch_size"
# torch has no class for gloo's errors: they are RuntimeErrors that begin with the place in gloo's sources, or with one
# of these texts. Anchored, so that a path in another message cannot match.
LOST_CONTACT = re.compile(
    r"\[[^\[\]]*\bgloo/(transport|rendezvous)/[\w/]+\.(cc|h):\d+\] |Gloo connectFullMesh failed with "
    r"|Application timeout caused pair closure|NCCL [Ee]rror|NCCL communicator was aborted"
)


def exit_line(outcome: Exception) -> tuple[str, int]:
    """Return the line to print for an error that all ranks have raised, and the exit status."""
    begin, status = next(result for kind, result in OUTCOMES.items() if isinstance(outcome, kind))
    note = _note(outcome) if isinstance(outcome, RunError) else None
    return begin + (f"{outcome} ({note})" if note else str(outcome)), status


def report_failure(problem: Exception, world: World) -> NoReturn:
    """Print one line for a failure of this rank, or for losing contact with others, and exit with status 1.

    Only the first rank that knows a cause prints it; those of other ranks are in torchrun's error files. If no rank
    knows one, as after a SIGKILL, the lowest surviving rank prints which ranks are missing.
    """
    cause, lost_contact = _prepare_report(problem), is_lost_contact(problem)
    note = _note(problem) or "outside of training"
    answered, is_reported = _ask_other_ranks(world, lost_contact)
    if lost_contact and not is_reported and min(answered) == world.rank:
        missing = ", ".join(str(rank) for rank in range(world.size) if rank not in answered)
        who = f"lost contact with rank(s) {missing}" if missing else f"lost contact: {cause}"
        print(f"error: rank {world.rank} {who}, {note}", file=sys.stderr, flush=True)
    elif not lost_contact and not is_reported:
        if isinstance(problem, torch.OutOfMemoryError):
            cause = f"{OUT_OF_MEMORY}: {cause}"
        elif not isinstance(problem, OSError) and not raised_by_model(problem):
            traceback.print_exception(problem)
        print(f"error: rank {world.rank} failed {note}: {cause}", file=sys.stderr, flush=True)
    exit_now(1)


def report_failure_to_connect(problem: Exception, rank: int) -> NoReturn:
    """Print one line for a failure that precedes the process group, and exit with status 1."""
    cause = _prepare_report(problem)
    if is_lost_contact(problem):
        line = f"rank {rank} could not connect to the other ranks: {cause}"
    else:
        traceback.print_exception(problem)
        line = f"rank {rank} failed at startup: {cause}"
    print(f"error: {line}", file=sys.stderr, flush=True)
    exit_now(1)


def _prepare_report(problem: Exception) -> str:
    """Write torchrun's error file if this rank knows the cause, and return it as one line."""
    # torchrun sends SIGTERM when the first rank exits: our line has to be printed first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not is_lost_contact(problem):
        with suppress(OSError):  # the disk may be full
            get_error_handler().record_exception(problem)
    return escape_control_characters(" ".join(str(problem).split())) or type(problem).__name__


def _note(problem: Exception) -> str | None:
    """Return the step in which the exception was raised: the note that `RunRecord` has added."""
    notes = getattr(problem, "__notes__", [])
    return escape_control_characters(notes[-1]) if notes else None


def is_lost_contact(problem: Exception) -> bool:
    """Tell whether an exception means that another rank cannot be reached, rather than that this rank has failed."""
    if isinstance(problem, dist.DistError):
        return True
    return isinstance(problem, RuntimeError) and LOST_CONTACT.match(str(problem)) is not None


def _ask_other_ranks(world: World, lost_contact: bool) -> tuple[set[int], bool]:
    """Tell the other ranks that this one fails, because it has lost contact or for a cause that it will report.

    Returns:
        The ranks that fail, too, with this one, and whether another rank reports a cause.
    """
    answered, reports = {world.rank}, [False]
    keys = [f"failed/{rank}" for rank in range(world.size)]

    def ask() -> None:  # the store, because collectives no longer work
        with suppress(RuntimeError):
            if not lost_contact:
                reports.append(world.store.add("cause", 1) > 1)
            world.store.set(keys[world.rank], "")
            if lost_contact:
                with suppress(dist.DistStoreError):  # some are missing
                    world.store.wait(keys, timedelta(seconds=ANSWER_SECONDS))
                answered.update(rank for rank, key in enumerate(keys) if world.store.check([key]))
                reports.append(world.store.check(["cause"]))

    thread = threading.Thread(target=ask, daemon=True)  # the store's rank or node may be gone, too: then it waits
    thread.start()
    thread.join(ANSWER_SECONDS + 1)
    return answered, reports[-1]


def exit_now(status: int) -> NoReturn:
    """Exit without waiting for the other ranks, which may be gone: a failed rank must not hang while it cleans up."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
