"""The folder of a run: create it, lock it, and refuse one that is in use."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from app.errors import UserError
from app.files import flush

RUNS = Path("runs")
LOCK = ".lock"


def create_folder(asked: str | None, parent: Path) -> Path:
    """The folder asked for, which must be new or empty, else a new one under `parent` with `parent/latest` on it.

    Raises:
        UserError: the folder is not empty, is a file, or can't be written.
    """
    folder = _create(asked, parent)
    if asked is None:
        point_latest(folder)
    return folder


def claim_folder(asked: str | None, parent: Path) -> tuple[Path, int]:
    """Create a run's folder, as `create_folder` does, and keep other jobs out of it.

    Returns:
        The folder, to which `latest` does not point yet, and the descriptor that `lock` returns.

    Raises:
        UserError: the folder is not empty or can't be written, or another job has it.
    """
    folder = _create(asked, parent)
    descriptor = lock(folder)
    if asked is not None:
        refuse_used(asked)  # another job may have run here, and ended, between the first check and the lock
    return folder, descriptor


def _create(asked: str | None, parent: Path) -> Path:
    folder = Path(asked) if asked is not None else parent / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    try:
        if asked is None:
            folder = _unused(folder)
        else:
            refuse_used(asked)
            _make(folder)
        probe = folder / ".probe.tmp"
        probe.touch()
        probe.unlink(missing_ok=True)  # another job may be trying the same folder
    except OSError as problem:
        raise UserError(f"--output_dir {folder}: can't be written: {problem.strerror}") from None
    return folder


def point_latest(folder: Path) -> None:
    """Let `latest`, beside the folder, point to it."""
    link = folder.with_name("latest")
    staging = link.with_name(f".{link.name}.{os.getpid()}")
    staging.symlink_to(folder.name)
    os.replace(staging, link)


def refuse_used(asked: str | None) -> None:
    """What `create_folder` would refuse, found out before anything has been done.

    Raises:
        UserError: the folder is not empty, or is a file.
    """
    if (
        asked is not None
        and Path(asked).exists()
        and (not Path(asked).is_dir() or any(map(_is_file_of_use, Path(asked).iterdir())))
    ):
        raise UserError(f"--output_dir {asked}: exists and is not an empty folder: name a new one")


def lock(folder: Path) -> int:
    """Keeps other jobs out of a folder until the descriptor that this returns is closed, or its process ends.

    Raises:
        UserError: another job has it, or it can't be opened.
    """
    try:
        # A file, because NFS does not pass the lock of a folder on to other machines.
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as problem:
        raise UserError(f"{folder}: can't be opened: {problem.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"{folder}: a run that has not ended is writing there: wait for it or end it first") from None
    except OSError:
        pass  # a file system that knows no locks
    return descriptor


def remove_claimed(folder: Path) -> None:
    """Remove a folder that `claim_folder` created, if nothing else has been written to it."""
    (folder / LOCK).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _is_file_of_use(path: Path) -> bool:
    """Whether a file is more than what a run that was killed at its start leaves."""
    return path.name != LOCK and not (path.name.startswith(".") and path.name.endswith(".tmp"))


def _unused(folder: Path) -> Path:
    """`folder`, or with a number behind it where runs started in the same second; made here, so it is this run's
    alone."""
    _make(folder.parent)
    candidate, number = folder, 1
    while True:
        try:
            candidate.mkdir()
            flush(candidate.parent)
            return candidate
        except FileExistsError:
            number += 1
            candidate = folder.with_name(f"{folder.name}-{number}")


def _make(folder: Path) -> None:
    """Create a folder and its parents so that their names survive a power failure."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        flush(path.parent)
