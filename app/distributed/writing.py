"""Write files during training: if that fails, stop the run or warn and continue, as `--on_save_failure` says."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from ..common.errors import RunError, escape_control_characters
from .collectives import first_failure
from .world import World

WRITE_ERRORS = (OSError, SafetensorError)


@contextmanager
def stop_or_warn(
    path: Path,
    *,
    on_failure: str,
    warn: Callable[[str], None],
    clean_up: Callable[[], None] | None = None,
    note: str = "",
    consequence: str = "training continues",
) -> Iterator[None]:
    """Turn an `OSError` inside the block, which writes `path`, into a warning, or into a `RunError` on `stop`.

    Args:
        clean_up: called after a failure, before it is reported; it may raise the failure instead.
        note: the end of both messages.
    """
    try:
        yield
    except OSError as problem:
        if clean_up:
            clean_up()
        message = f"{path} could not be written: {problem.strerror or problem}{note}"
        if on_failure == "stop":
            raise RunError(message) from None
        warn(f"warning: {escape_control_characters(message)}; {consequence} (--on_save_failure continue)")


def write_on_ranks(work: Callable[[], None], folder: Path, world: World, *, main_only: bool = False) -> None:
    """Do the work on every rank, or only on rank 0. Collective.

    Raises:
        OSError: on every rank, with the problem of the lowest rank that has one.
    """
    problem = None
    if world.is_main_process or not main_only:
        try:
            work()
        except WRITE_ERRORS as error:
            problem = " ".join(str(error).split()) or type(error).__name__
            if not isinstance(error, OSError):  # a library's message, which does not mention a full disk
                with suppress(OSError):  # the folder may be gone
                    problem += f" ({shutil.disk_usage(folder).free >> 20} MiB are free there)"
    if (reported := first_failure(problem, world)) is not None:
        raise OSError(reported)
