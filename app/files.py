"""Files and folders as a run and a comparison leave them: whole or not there, in a folder that is theirs alone."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Writes a whole file or none of it. A lone surrogate, as in a path that is not UTF-8, becomes its JSON escape."""
    staging = path.with_name(f".{path.name}.tmp")
    with staging.open("w", encoding="utf-8", newline="", errors="backslashreplace") as file:
        file.write(text)
    commit(staging, path)


def commit(staging: Path, path: Path) -> None:
    """Give a finished file or folder its name, replacing what was there.

    Everything is on disk before the name is, and the name is on disk when this returns. Otherwise a power failure could
    leave a file that is named but empty, or keep a later file and lose an earlier one.
    """
    for entry in (*staging.rglob("*"), staging):
        flush(entry)
    if staging.is_dir():
        shutil.rmtree(path, ignore_errors=True)  # a folder can't replace one that is not empty
    os.replace(staging, path)
    flush(path.parent)


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
