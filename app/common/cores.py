"""The CPU cores of a process."""

from __future__ import annotations

import os


def usable_cores(process: int = 0) -> set[int]:
    """Return the numbers of the CPU cores that the process with this id (0: this process) may use."""
    return os.sched_getaffinity(process) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
