"""The report: races, waits of the host, notes, and errors that a GPU would raise."""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

REPOSITORY = Path(__file__).parents[2]
# Between a line of the program and the operation that it calls.
HIDDEN_FILES: tuple[str, ...] = (
    "_ops.py",
    "_python_dispatch.py",
    "_pytree.py",
    "eval_frame.py",
    "_compile.py",
    "_tensor.py",
)
HIDDEN_FILES += ("_contextlib.py", "module.py", "record_function")


class FakeCudaError(RuntimeError):
    """An operation that would fail on a GPU."""


class Report:
    """The findings on this rank, with the lines of the program that caused them.

    Attributes:
        races: accesses to memory that no event or wait orders.
        waits: of the host, for work on the device that was not known to be over.
        notes: what is allowed, but worth knowing, such as the collectives that were called.
        kernels: how many were launched.
        peak_bytes: of memory on this rank's device.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.races: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.kernels = self.peak_bytes = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the content as JSON has it, the most frequent lines first."""
        counters = {name: dict(getattr(self, name).most_common()) for name in ("races", "waits", "notes")}
        return counters | {"kernels": self.kernels, "peak_bytes": self.peak_bytes}

    def write(self, folder: Path, rank: int) -> None:
        """Write `report-<rank>.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"report-{rank}.json").write_text(json.dumps(self.as_dict(), indent=1))


REPORT = Report()


def where() -> str:
    """Return the innermost line of the program that is running, and the innermost line of a library below it."""
    own = library = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and own is None:
        kind, line = _kind(frame.f_code.co_filename), (frame.f_code.co_filename, frame.f_lineno)
        if kind == "program":
            own = line
        elif kind == "library" and library is None:
            library = line
        frame = frame.f_back
    places = [(Path(file), line) for file, line in filter(None, (own, library))]
    return " < ".join(f"{file.parent.name}/{file.name}:{line}" for file, line in places)


@functools.cache
def _kind(file: str) -> str:
    path = Path(file)
    if path.parent == Path(__file__).parent and not path.name.startswith("planted_"):
        return "hidden"
    if file.endswith(HIDDEN_FILES) or file.startswith("<"):
        return "hidden"
    return "program" if path.is_relative_to(REPOSITORY) and "site-packages" not in path.parts else "library"
