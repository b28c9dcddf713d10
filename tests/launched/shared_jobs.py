"""Trainings of several test files in one job for each number of ranks: to start a job takes longer than to train.

A test file of launched/ lists its runs in `SHARED_RUNS`, by job and name, and those that only its slow tests need in
`SLOW_SHARED_RUNS`; if all its tests are slow, `SHARED_RUNS` may have all runs. Its runs have a folder of their own, to
which its `write_inputs(folder, csv)` writes what they read. Only runs of files with selected tests are trained, so a
file can still be run alone.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping, Sequence
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
        self._modules: dict[str, ModuleType] = {}
        self._with_slow: set[str] = set()
        for test in tests:
            module = getattr(test, "module", None)
            if hasattr(module, "SHARED_RUNS"):
                name = _short_name(module)
                self._modules[name] = module
                if test.get_closest_marker("slow"):
                    self._with_slow.add(name)

    def train(self, module: ModuleType, job: str) -> dict[str, Outcome]:
        """Train a job and those before it, unless that has been done. Return the outcomes of a file's runs."""
        with self._lock():
            for earlier in [*JOBS][: [*JOBS].index(job)]:
                self._train_once(earlier)
            self._train_once(job)
        outcomes = json.loads(self._outcomes_of(job).read_text()).get(_short_name(module), {})
        return {name: Outcome(**outcome) for name, outcome in outcomes.items()}

    def folder(self, module: ModuleType) -> Path:
        """Return the folder of a file's runs."""
        return self._root / _short_name(module)

    def _outcomes_of(self, job: str) -> Path:
        return self._root / f"{job}.json"

    def _train_once(self, job: str) -> None:
        file, failure = self._outcomes_of(job), self._root / f"{job}.failed"
        if failure.exists():
            raise AssertionError(f"the job {job} has failed: {failure.read_text()}")
        if file.exists():
            return
        runs = {name: self._runs_of(name, job) for name in self._modules}
        folders = {self.folder(self._modules[name]): of_file for name, of_file in runs.items() if of_file}
        for folder in folders:
            if not folder.exists():
                folder.mkdir()
                self._modules[folder.name].write_inputs(folder, self._csv)
        outcomes = {}
        if folders:
            try:
                trained = run_folders(self._root, folders, limit=1500, **JOBS[job])
            except AssertionError as failed:
                failure.write_text(str(failed))  # not tried again by the next test
                raise
            outcomes = {
                folder.name: {name: asdict(outcome) for name, outcome in of_file.items()}
                for folder, of_file in trained.items()
            }
        file.write_text(json.dumps(outcomes))

    def _runs_of(self, name: str, job: str) -> Mapping[str, TrainingRun]:
        module = self._modules[name]
        slow = getattr(module, "SLOW_SHARED_RUNS", {}) if name in self._with_slow else {}
        return module.SHARED_RUNS.get(job, {}) | slow.get(job, {})

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self._root.mkdir(exist_ok=True)
        with (self._root / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _short_name(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2].removeprefix("test_")
