"""Files and folders as a run and a comparison leave them: whole or not there, in a folder that is theirs alone."""

from __future__ import annotations

import fcntl
import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

from app.errors import UserError

RUNS = Path("runs")


def create_folder(asked: str | None, parent: Path) -> Path:
    """The folder asked for, which must be new or empty, else a new one under `parent` with `parent/latest` on it.

    Raises:
        UserError: the folder is not empty, is a file, or can't be written.
    """
    folder = Path(asked) if asked is not None else parent / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    try:
        if asked is None:
            folder = _unused(folder)
        else:
            refuse_used(asked)
            folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe.tmp"
        probe.touch()
        probe.unlink()
        if asked is None:
            _point(parent / "latest", folder.name)
    except OSError as problem:
        raise UserError(f"--output_dir {folder}: can't be written: {problem.strerror}") from None
    return folder


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
        descriptor = os.open(folder, os.O_RDONLY)
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


def _is_file_of_use(path: Path) -> bool:
    """Not what a run that was killed as it started has left of a file that it wrote aside."""
    return not (path.name.startswith(".") and path.name.endswith(".tmp"))


def _unused(folder: Path) -> Path:
    """`folder`, or with a number behind it where runs started in the same second; made here, so it is this run's
    alone."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    candidate, number = folder, 1
    while True:
        try:
            candidate.mkdir()
            return candidate
        except FileExistsError:
            number += 1
            candidate = folder.with_name(f"{folder.name}-{number}")


def _point(link: Path, target: str) -> None:
    aside = link.with_name(f".{link.name}.{os.getpid()}")
    aside.symlink_to(target)
    os.replace(aside, link)


def write_text(path: Path, text: str) -> None:
    """Writes a whole file or none of it. A lone surrogate, as in a path that is not UTF-8, becomes its JSON escape."""
    aside = path.with_name(f".{path.name}.tmp")
    with aside.open("w", encoding="utf-8", newline="", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def flush(path: Path) -> None:
    """Brings a file's content, or the names in a folder, to the disk: it outlives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any) -> None:
    """JSON with every float as `repr` gives it: what is read back is equal to the bit."""
    write_text(path, json.dumps(content, ensure_ascii=False, indent=2, allow_nan=False) + "\n")
