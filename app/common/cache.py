"""Files of a cache, which end with a digest of their content: a damaged or renamed file is not used."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from .files import commit, staging_folder

DIGEST_BYTES = hashlib.sha256().digest_size


def read_intact(path: Path, key: str) -> memoryview | None:
    """Return the content of a file; None if it is missing, damaged, or was written for another key."""
    try:
        content = memoryview(path.read_bytes())
    except OSError:
        return None
    body, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    return body if len(body) and _digest(key, body) == digest else None


def write_intact(path: Path, key: str, write: Callable[[Path], object]) -> None:
    """Write a file, which is complete when it receives its name.

    Args:
        key: identifies everything that determines the content.
        write: writes the content into the file that it is given.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with staging_folder(path) as staging:
        file = staging / path.name
        write(file)
        with file.open("ab") as stream:
            stream.write(_digest(key, file.read_bytes()))
        commit(file, path)


def _digest(key: str, content: bytes | memoryview) -> bytes:
    """Return the SHA-256 of the key and the content. Including the key detects files with a wrong name."""
    digest = hashlib.sha256(key.encode())
    digest.update(content)
    return digest.digest()
