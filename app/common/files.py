"""Write files and folders atomically: a name refers to complete content on disk, or does not exist."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .errors import UserError


def write_text(path: Path, text: str | Iterable[str]) -> None:
    """Write a text, or the parts of one, atomically, in UTF-8."""
    # A lone surrogate, which represents a byte of a path that is not UTF-8, is written as its JSON escape.
    staging = path.with_name(f".{path.name}.tmp")
    with staging.open("w", encoding="utf-8", newline="", errors="backslashreplace") as file:
        file.writelines([text] if isinstance(text, str) else text)
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
    """Remove a folder if there is one. It loses its name first: if this is interrupted, what is left has another name.

    Of a link, remove only the link: its target belongs to another folder, such as an archive.
    """
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        trash = path.with_name(f".{path.name}.old")
        shutil.rmtree(trash, ignore_errors=True)
        os.rename(path, trash)
        shutil.rmtree(trash, ignore_errors=True)


def flush(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cached_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file of the cache unless it is there. Processes that write it at the same time write the same.

    Args:
        path: its name identifies everything that determines the content.
        write: writes the content into the file that it is given.

    Raises:
        UserError: the folder, which is that of `--cache_dir`, cannot be written.
    """
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as staging:
                write(Path(staging, path.name))
                commit(Path(staging, path.name), path)
    except OSError as problem:
        raise UserError(f"--cache_dir {path.parent}: cannot be written: {problem.strerror or problem}") from None


def check_exists(path: Path) -> None:
    """Check that there is a regular file, without reading it.

    Raises:
        UserError: There is none.
    """
    if not os.path.isfile(path):
        raise UserError(f"{path}: {'is not a regular file' if os.path.exists(path) else 'no such file'}")
