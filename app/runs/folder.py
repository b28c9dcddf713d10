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


def create_folder(requested: str | None, parent: Path, *, latest: bool = True) -> Path:
    """Create a folder for results.

    Args:
        requested: a folder that must be new or empty (`--output_dir`); None: create a new one under `parent`.
        latest: let the link `latest` next to a new folder under `parent` point to it. A run does so later.

    Raises:
        UserError: the folder is not empty, is a file, or cannot be written.
    """
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
    if latest:
        point_latest(folder)
    return folder


def point_latest(folder: Path) -> None:
    """Let the link `latest` next to a folder point to it."""
    link = folder.with_name(LATEST)
    staging = link.with_name(f".{link.name}.{os.getpid()}")
    staging.symlink_to(folder.name)
    os.replace(staging, link)


def reject_used(requested: str | None) -> None:
    """Raise UserError if `create_folder` would reject a folder because it is a file or not empty."""
    folder = Path(requested or "")
    if requested is None or not folder.exists():
        return
    # A run that was killed at its start leaves its lock, and files that are not complete.
    names = {path.name for path in folder.iterdir()} - {LOCK} if folder.is_dir() else {""}
    if not all(name.startswith(".") and name.endswith(".tmp") for name in names):
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
