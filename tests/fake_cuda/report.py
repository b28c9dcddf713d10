"""The report: races, waits of the host, notes, and errors that a GPU would raise."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

REPOSITORY = Path(__file__).parents[2]
# Between a line of the program and the operation that it calls. Programs with planted defects are in fake_cuda/, too.
HIDDEN = re.compile(
    r"^<|fake_cuda/(?!test_)|record_function"
    r"|/(_ops|_python_dispatch|_pytree|eval_frame|_compile|_tensor|_contextlib|module)\.py$"
)


class FakeCudaError(RuntimeError):
    """An operation that would fail on a GPU."""


@dataclass
class Report:
    """The findings on this rank, with the lines of the program that caused them.

    Attributes:
        races: accesses to memory that no event or wait orders.
        waits: of the host, for work on the device that was not known to be over.
        notes: the collectives that were called.
        kernels: how many were launched.
    """

    races: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    kernels: int = 0

    def clear(self) -> None:
        """Forget everything."""
        vars(self).update(vars(Report()))

    def count_wait(self, reason: str, has_waited: int) -> None:
        """Count a wait of the host if it has really waited."""
        if has_waited:
            self.waits[f"{reason} at {where()}"] += 1

    def write(self, folder: Path) -> None:
        """Write `report-<rank>.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"report-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(vars(self), indent=1))


REPORT = Report()


def where() -> str:
    """Return the innermost line of the program that is running, and the innermost line of a library below it."""
    own = library = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and own is None:
        path = Path(frame.f_code.co_filename)
        line = f"{path.parent.name}/{path.name}:{frame.f_lineno}"
        kind = _kind(frame.f_code.co_filename)
        if kind == "program":
            own = line
        elif kind == "library" and library is None:
            library = line
        frame = frame.f_back
    return " < ".join(filter(None, (own, library)))


@functools.cache
def _kind(file: str) -> str:
    if HIDDEN.search(file):
        return "hidden"
    path = Path(file)
    return "program" if path.is_relative_to(REPOSITORY) and "site-packages" not in path.parts else "library"
