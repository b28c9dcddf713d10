"""The folder of a run: create it, lock it, and reject a folder that is in use."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from ..common.errors import UserError
from .schema import LATEST, LOCK


def create_folder(requested: str | None, parent: Path) -> Path:
    """Create a folder for results.

    Args:
        requested: a folder that must be new or empty (`--output_dir`); None: create a new one under `parent`, and let
            the link `latest` there point to it.

    Raises:
        UserError: the folder is not empty, is a file, or cannot be written.
    """
    folder = _create(requested, parent)
    if requested is None:
        point_latest(folder)
    return folder


def claim_folder(requested: str | None, parent: Path) -> tuple[Path, int]:
    """Create a run's folder like `create_folder`, and keep other jobs out of it.

    Returns:
        The folder, to which `latest` does not point yet, and the descriptor that `lock` returns.

    Raises:
        UserError: the folder is not empty or cannot be written, or another job uses it.
    """
    folder = _create(requested, parent)
    descriptor = lock(folder)
    if requested is not None:
        reject_used(requested)  # another job may have run here and ended between the first check and the lock
    return folder, descriptor


def point_latest(folder: Path) -> None:
    """Let the link `latest` next to a folder point to it."""
    link = folder.with_name(LATEST)
    staging = link.with_name(f".{link.name}.{os.getpid()}")
    staging.symlink_to(folder.name)
    os.replace(staging, link)


def reject_used(requested: str | None) -> None:
    """Raise UserError if `create_folder` would reject a folder because it is a file or not empty."""
    if requested is None or not Path(requested).exists():
        return
    if not Path(requested).is_dir() or any(map(_is_content, Path(requested).iterdir())):
        raise UserError(f"--output_dir {requested}: exists and is not an empty folder: name a new one")


def lock(folder: Path) -> int:
    """Keep other jobs out of a folder until the returned descriptor is closed or this process ends.

    Raises:
        UserError: another job has locked it, or it cannot be opened.
    """
    try:
        # A file, because NFS does not pass the lock of a folder on to other machines.
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as problem:
        raise UserError(f"{folder}: cannot be opened: {problem.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"{folder}: a run that has not ended is writing to it: wait for it or end it first") from None
    except OSError:
        pass  # the file system does not support locks
    return descriptor


def remove_claimed(folder: Path) -> None:
    """Remove a folder that is locked, and its lock, if nothing else is in it."""
    (folder / LOCK).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _create(requested: str | None, parent: Path) -> Path:
    folder = Path(requested) if requested is not None else parent / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    try:
        if requested is not None:
            reject_used(requested)
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return folder
        for number in itertools.count(2):  # another job may start in the same second
            with suppress(FileExistsError):
                folder.mkdir(parents=True)
                break
            folder = folder.with_name(f"{folder.name[:19]}-{number}")
    except OSError as problem:
        raise UserError(f"--output_dir {folder}: cannot be written: {problem.strerror}") from None
    return folder


def _is_content(path: Path) -> bool:
    """Return whether a file is more than what a run that was killed at startup leaves behind."""
    return path.name != LOCK and not (path.name.startswith(".") and path.name.endswith(".tmp"))
