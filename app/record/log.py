"""A JSON Lines file that grows during a run and remains readable when the disk is full."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..common.files import flush
from ..distributed.writing import stop_or_warn


class MetricsLog:
    """An append-only log. Lines that could not be written are kept in memory and written with the next ones.

    The file therefore never lacks a line between two others, and ends with a complete line even after a failed write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pending = b""
        self.size: int | None = None  # bytes that are known to be complete lines

    def append(self, lines: str) -> None:
        """Append complete lines, which end with a line feed; an empty string writes only the pending lines.

        Raises:
            OSError: the lines could not be written; they remain pending.
        """
        self.pending += lines.encode()
        if not self.pending:
            return
        with self.path.open("ab", buffering=0) as file:  # unbuffered: closing the file must not write again
            length = file.seek(0, os.SEEK_END)
            self.size = length if self.size is None else min(self.size, length)
            file.truncate(self.size)  # a file system may report a failed write as late as in close()
            try:
                written = 0
                while written < len(self.pending):  # a nearly full disk may accept only part of it
                    written += file.write(self.pending[written:])
            except OSError:
                with suppress(OSError):
                    file.truncate(self.size)
                raise
        self.size += len(self.pending)
        self.pending = b""

    def append_or_keep(self, lines: str, warn: Callable[[str], None]) -> None:
        """Append complete lines. If that fails, such as on a full disk, warn once and keep them in memory.

        Raises:
            OSError: the log's folder is gone.
        """
        had_failed = bool(self.pending)

        def raise_if_folder_is_gone() -> None:
            if not self.path.parent.is_dir():
                raise  # the OSError that is being handled: the lines can never be written

        kept = "training continues, and the lines are kept in memory until they can be written"
        warn_once = (lambda _: None) if had_failed else warn
        with stop_or_warn(
            self.path, on_failure="continue", warn=warn_once, clean_up=raise_if_folder_is_gone, consequence=kept
        ):
            self.append(lines)

    def count_lines(self) -> int:
        return self.path.read_bytes().count(b"\n") if self.path.exists() else 0

    def flush(self) -> None:
        """Write all pending lines, and flush the file to disk.

        Raises:
            OSError: the lines could not be written or flushed.
        """
        self.append("")
        if self.path.exists():
            flush(self.path)
