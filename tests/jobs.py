"""Jobs that tests start: what they printed, what they left, and how to end all of their processes."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

PROJECT = Path(__file__).parents[1]
SAMPLE_CSV = PROJECT / "data" / "sample_reviews.csv"


@dataclass
class Finished:
    status: int
    out: str
    err: str

    @property
    def error_lines(self) -> list[str]:
        """The lines of ours that say what was wrong."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


def processes_of(mark: str) -> list[psutil.Process]:
    """All processes, whatever their session or parent, that were started with this mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("TWO_ROADS_TEST_JOB") == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def end_processes(mark: str) -> list[str]:
    """Ends what is left of a job that should have ended; returns what it was."""
    # torchrun's own helpers take a moment to notice that their parent has gone.
    _, alive = psutil.wait_procs(processes_of(mark), timeout=5)
    left = []
    for process in alive:
        try:
            left.append(" ".join(process.cmdline()))
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    return left


def read_steps(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
