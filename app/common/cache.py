"""Files of a cache, which end with a digest of their content: a damaged or renamed file is not used."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from .errors import UserError
from .files import commit, staging_folder

DIGEST_BYTES = hashlib.sha256().digest_size
CHUNK = 1 << 20  # bytes that are hashed at once: a file may be larger than the memory


def is_intact(path: Path, key: str) -> bool:
    """Tell whether there is a file that was written for this key and is not damaged."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END) - DIGEST_BYTES
            file.seek(0)
            return size > 0 and _digest(key, file, size) == file.read()
    except OSError:
        return False


def write_intact(path: Path, key: str, write: Callable[[Path], object]) -> None:
    """Write a file, which is complete when it receives its name.

    Args:
        key: identifies everything that determines the content.
        write: writes the content into the file that it is given, in a folder that is removed afterwards.

    Raises:
        UserError: the folder, which is that of `--cache_dir`, cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with staging_folder(path) as staging:
            file = staging / path.name
            write(file)
            with file.open("r+b") as stream:
                stream.write(_digest(key, stream, file.stat().st_size))
            commit(file, path)
    except OSError as problem:
        raise UserError(f"--cache_dir {path.parent}: cannot be written: {problem.strerror or problem}") from None


def _digest(key: str, file: BinaryIO, size: int) -> bytes:
    """Return the SHA-256 of the key and the next bytes of a file. Including the key detects files with a wrong name."""
    digest = hashlib.sha256(key.encode())
    while size > 0 and (chunk := file.read(min(size, CHUNK))):
        digest.update(chunk)
        size -= len(chunk)
    return digest.digest()
