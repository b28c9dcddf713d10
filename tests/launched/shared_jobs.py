"""Trainings of several test files in one job for each number of ranks: to start a job takes longer than to train.

A test file of launched/ lists its runs in `SHARED_RUNS`, by job and name, and those that only its slow tests need in
`SLOW_SHARED_RUNS`; if all its tests are slow, `SHARED_RUNS` may have all runs. Its runs have a folder of their own, to
which its `write_inputs(folder, csv)` writes what they read. Only runs of files with selected tests are trained, so a
file can still be run alone.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.jobs import Outcome, TrainingRun, run_folders

# In the order in which they are trained: runs may resume those of earlier jobs.
JOBS: dict[str, dict[str, Any]] = {
    "one_rank": {"ranks": 0},
    "two_ranks": {"ranks": 2},
    "three_ranks": {"ranks": 3},
    "four_ranks": {"ranks": 4},
    "eight_ranks": {"ranks": 8},
    "two_nodes": {"ranks": 4, "RANKS_PER_NODE": "2"},  # each with two ranks, which sum gradients inside it first
}
SharedRuns = dict[str, dict[str, TrainingRun]]


class SharedJobs:
    """The jobs of a test session. With pytest-xdist, the worker that needs a job first trains it; the others wait.

    Args:
        root: the folder of all runs, the same for all workers.
        csv: the reviews from which the files write their inputs.
        tests: the selected tests.
    """

    def __init__(self, root: Path, csv: Path, tests: Sequence[pytest.Item]) -> None:
        self._root, self._csv = root, csv
        self._modules: dict[Path, ModuleType] = {}  # by the folders of their runs
        self._runs: dict[str, dict[Path, dict[str, TrainingRun]]] = {job: {} for job in JOBS}
        for test in tests:
            module = getattr(test, "module", None)
            if hasattr(module, "SHARED_RUNS"):
                folder = self.folder(module)
                self._modules[folder] = module
                needed = [module.SHARED_RUNS]
                if test.get_closest_marker("slow"):
                    needed.append(getattr(module, "SLOW_SHARED_RUNS", {}))
                for job, runs in ((job, runs) for shared in needed for job, runs in shared.items()):
                    self._runs[job].setdefault(folder, {}).update(runs)

    def train(self, module: ModuleType, job: str) -> dict[str, Outcome]:
        """Train a job and those before it, unless that has been done. Return the outcomes of a file's runs."""
        with self._lock():
            for earlier in [*JOBS][: [*JOBS].index(job)]:
                self._train_once(earlier)
            outcomes = self._train_once(job)
        return {name: Outcome(**outcome) for name, outcome in outcomes.get(str(self.folder(module)), {}).items()}

    def folder(self, module: ModuleType) -> Path:
        """Return the folder of a file's runs."""
        return self._root / module.__name__.rpartition(".")[2].removeprefix("test_")

    def _train_once(self, job: str) -> dict[str, dict[str, Any]]:
        file = self._root / f"{job}.json"
        if not file.exists():
            file.write_text(json.dumps(self._train(job)))
        outcomes: dict[str, dict[str, Any]] = json.loads(file.read_text())
        assert "failure" not in outcomes, f"the job {job} has failed: {outcomes['failure']}"
        return outcomes

    def _train(self, job: str) -> dict[str, Any]:
        runs = {folder: of_file for folder, of_file in self._runs[job].items() if of_file}
        for folder in runs:
            if not folder.exists():
                folder.mkdir()
                self._modules[folder].write_inputs(folder, self._csv)
        if not runs:
            return {}
        try:
            trained = run_folders(self._root, runs, limit=1500, **JOBS[job])
        except AssertionError as failed:
            return {"failure": str(failed)}  # not tried again by the next test
        return {
            str(folder): {name: asdict(one) for name, one in of_file.items()} for folder, of_file in trained.items()
        }

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self._root.mkdir(exist_ok=True)
        with (self._root / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
