"""A JSON Lines file that grows during a run and stays readable when the disk is full."""

from __future__ import annotations

import os
from pathlib import Path


class MetricsLog:
    """An append-only log. Lines that could not be written are kept in memory and written with the next ones.

    The file on disk therefore never misses a line between two others and never ends in part of a line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pending = b""

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
            size = file.seek(0, os.SEEK_END)
            try:
                written = 0
                while written < len(self.pending):  # a nearly full disk accepts only a part
                    written += file.write(self.pending[written:])
            except OSError:
                file.truncate(size)
                raise
        self.pending = b""
