"""What an unfinished prediction has computed, for the next attempt. Rank 0 reads and writes it."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..common.files import commit
from ..runs.folder import lock, remove_claimed

OWN_NAME = re.compile(r"[0-9a-f]{16}-\d{5}\.(npy|tmp)")  # of the files in the folder


class PartialLogits:
    """A hidden folder next to the output, with a file of logits for each segment that is done.

    As a context manager, it is removed at the end of the block, which writes the output, unless it has other files. It
    is locked until then, so that no two jobs write the same output.
    """

    def __init__(self, output: Path, key: str) -> None:
        """Open or create the folder.

        Args:
            key: identifies all that determines the logits. Segments of another prediction are not used.

        Raises:
            UserError: another job predicts into this output.
            OSError: the folder cannot be written.
        """
        self.folder, self.key = output.with_name(f".{output.name}.partial"), key
        self.folder.mkdir(exist_ok=True)
        self._lock = lock(self.folder, shown=output)

    def read(self, segment: int, shape: tuple[int, int]) -> NDArray[np.float64] | None:
        """Return the logits of a segment, float64; None if it is not done or its file is damaged."""
        with suppress(OSError, ValueError, EOFError):
            logits: NDArray[Any] = np.load(self._path(segment), allow_pickle=False)
            if logits.shape == shape and logits.dtype == np.float64:
                return logits
        return None

    def write(self, segment: int, logits: NDArray[np.float64]) -> None:
        """Keep the logits of a segment.

        Raises:
            OSError: they cannot be written.
        """
        path = self._path(segment)
        staging = path.with_suffix(".tmp")
        with staging.open("wb") as file:
            np.save(file, logits, allow_pickle=False)
        commit(staging, path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let other jobs use the output. Unless the block has failed, remove all segments, also earlier ones."""
        try:
            if kind is None:
                for path in self.folder.iterdir():
                    if OWN_NAME.fullmatch(path.name) and path.is_file():
                        path.unlink(missing_ok=True)
                remove_claimed(self.folder)
        finally:
            os.close(self._lock)

    def _path(self, segment: int) -> Path:
        return self.folder / f"{self.key[:16]}-{segment:05}.npy"
