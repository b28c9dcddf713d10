"""The folder of a run: create it, lock it, and reject a folder that is in use."""

from __future__ import annotations

import fcntl
import os
from datetime import datetime
from pathlib import Path

from ..common.errors import UserError
from .schema import LATEST, LOCK


def create_folder(requested: str | None, parent: Path) -> Path:
    """Create a folder for results.

    Args:
        requested: a folder that must be new or empty (`--output_dir`); None: create a new one under `parent`.

    Raises:
        UserError: the folder is not empty, is a file, or cannot be written.
    """
    folder = Path(requested) if requested is not None else parent / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    try:
        reject_used(requested)
        try:
            folder.mkdir(parents=True, exist_ok=requested is not None)
        except FileExistsError:
            if requested is not None:
                raise
            folder = parent / f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}"  # another job has started in the same second
            folder.mkdir()
    except OSError as problem:
        raise UserError(f"--output_dir {folder}: cannot be written: {problem.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"--output_dir {folder}: cannot be written: you have no permission")
    return folder


def point_latest(folder: Path) -> None:
    """Let the link `latest` next to a folder point to it."""
    link = folder.with_name(LATEST)
    staging = link.with_name(f".{link.name}.{os.getpid()}")
    staging.symlink_to(folder.name)
    os.replace(staging, link)


def reject_used(requested: str | None) -> None:
    """Raise UserError if `create_folder` would reject a folder because it is a file or not empty."""
    if requested is None or not os.path.exists(requested):  # unlike Path.exists, False for a name that is too long
        return
    # A run that was killed at its start leaves its lock, and files that are not complete.
    names = {*os.listdir(requested)} - {LOCK} if os.path.isdir(requested) and os.access(requested, os.R_OK) else {""}
    if not all(name.startswith(".") and name.endswith(".tmp") for name in names):
        raise UserError(f"--output_dir {requested}: exists and is not an empty folder: name a new one")


def lock(folder: Path) -> int:
    """Keep other jobs out until the returned descriptor is closed. Raises UserError if one is in, or it fails."""
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
