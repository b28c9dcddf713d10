"""Write files and folders atomically: a name refers to complete content on disk, or does not exist."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .errors import UserError


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, in UTF-8."""
    # A lone surrogate, which represents a byte of a path that is not UTF-8, is written as its JSON escape.
    staging = path.with_name(f".{path.name}.tmp")
    with staging.open("w", encoding="utf-8", newline="", errors="backslashreplace") as file:
        file.write(text)
    commit(staging, path)


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically. Floats are written in full precision, so reading them returns identical values."""
    write_text(path, json.dumps(content, ensure_ascii=False, indent=2, allow_nan=False) + "\n")


def commit(staging: Path, path: Path) -> None:
    """Rename a finished file or folder, replacing the file or folder that has this name.

    The content is flushed to disk before the rename, and the rename before this returns. Otherwise a power failure
    could leave a file that has its name but no content, or keep a later file and lose an earlier one.
    """
    for entry in (*staging.rglob("*"), staging):
        flush(entry)
    if staging.is_dir():
        remove(path)  # os.replace cannot replace a folder that is not empty, nor a link by a folder
    os.replace(staging, path)
    flush(path.parent)


def remove(path: Path) -> None:
    """Remove a folder if there is one. Of a link, remove only the link, not its target."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def flush(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def staging_folder(path: Path) -> Iterator[Path]:
    """Create a private folder next to a file that is about to be written, and remove it at the end of the block.

    Staging folders of killed processes are removed first. Each running process holds a lock, so its folder is kept.

    Args:
        path: The file that the caller will move out of the folder.

    Raises:
        OSError: The parent folder cannot be written.
    """
    _remove_stale_staging(path.parent)
    folder = path.with_name(f".{path.name}.{uuid.uuid4().hex}.staging")
    lock = folder.with_name(f"{folder.name}.lock")
    # The lock outlives the folder, so that a folder without a lock cannot exist.
    descriptor = _create_locked(lock)
    try:
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _create_locked(lock: Path) -> int:
    """Create and lock a file with a unique name; return its descriptor."""
    while True:
        descriptor = os.open(lock, os.O_CREAT | os.O_RDWR, 0o666)
        with suppress(OSError):  # without locks on this file system, no process can remove stale folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if lock.exists():
            return descriptor
        os.close(descriptor)  # another process took the file for a stale one between open and flock


def _remove_stale_staging(parent: Path) -> None:
    for lock in parent.glob(".*.staging.lock"):
        with suppress(OSError), lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink()


def check_exists(path: Path) -> None:
    """Check that there is a regular file, without reading it.

    Raises:
        UserError: There is none.
    """
    if not os.path.exists(path):
        raise UserError(f"{path}: no such file")
    if not os.path.isfile(path):
        kind = "a folder" if os.path.isdir(path) else "not a regular file"
        raise UserError(f"{path}: is {kind}; give the path of a CSV file")
