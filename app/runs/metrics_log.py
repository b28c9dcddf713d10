"""A JSON Lines file that grows during a run and stays readable when the disk is full."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from app import files


class MetricsLog:
    """An append-only log. Lines that could not be written are kept in memory and written with the next ones.

    So the file never lacks a line between two others, and after a failed write it still ends with a whole line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pending = b""
        self.size: int | None = None  # bytes that are known to be whole lines

    def append(self, lines: str) -> None:
        """Append whole lines.

        Args:
            lines: text that ends with a line feed, or nothing to write only what is pending.

        Raises:
            OSError: the lines could not be written; they stay pending.
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
                while written < len(self.pending):  # a nearly full disk accepts only a part
                    written += file.write(self.pending[written:])
            except OSError:
                with suppress(OSError):
                    file.truncate(self.size)
                raise
        self.size += len(self.pending)
        self.pending = b""

    def flush(self) -> None:
        """Bring every line to the disk.

        Raises:
            OSError: that is not possible.
        """
        self.append("")
        if self.path.exists():
            files.flush(self.path)
