"""Fixtures that many tests use: data, jobs, a process group, and small file systems."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hypothesis
import pytest
import torch
from helpers.jobs import LIMIT, SAMPLE_CSV, Finished, Job, Outcome, find_real_csv, in_ci, unavailable, write_reviews
from launched.shared_jobs import SharedJobs
from launched.two_nodes import connect, ip

from app.bench.two_nodes import NamespacesUnavailable, network_namespaces
from app.distributed.preemption import SIGNALS
from app.distributed.process_group import join
from app.distributed.world import World
from app.settings import Settings

hypothesis.settings.register_profile("busy machine", deadline=None)
hypothesis.settings.load_profile("busy machine")

HANDLERS: dict[int, Any] = {}  # of pytest


def pytest_configure() -> None:
    """Let the processes that tests start receive SIGINT and SIGHUP, also under `nohup pytest … &`.

    With nohup, pytest ignores these signals, and child processes inherit that, so tests could not stop them. This
    handler does nothing, so pytest still ignores the signals, but child processes do not inherit it.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    HANDLERS.update({number: signal.getsignal(number) for number in SIGNALS})


@pytest.fixture(autouse=True)
def stop_requests_end_with_the_test() -> Iterator[None]:
    """Restore the handlers of signals before and after a test: a run in this process, or in a fixture, changes them.

    A finished run ignores the signals, which child processes would inherit. A failed one treats them as stop requests
    until its process ends, and would end the process at the second signal of another test.
    """
    restore_handlers()
    yield
    restore_handlers()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Compute with one CPU thread, also after a test that resumed a run with more of them: the number affects rounding.

    The models in tests are so small that further threads would only wait for each other.
    """
    torch.set_num_threads(1)


def restore_handlers() -> None:
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)
    writer = signal.set_wakeup_fd(-1)
    if writer != -1:
        os.close(writer)  # ends the thread that listens


def uses_shared_jobs(item: pytest.Item) -> bool:
    return hasattr(getattr(item, "module", None), "SHARED_RUNS")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` without a GPU, and sort the files.

    First the file whose worker trains the shared jobs; then files with jobs of their own and half of the files without
    jobs, which the other workers run meanwhile; then the other files with shared jobs; and at the end the remaining,
    short files, so that all workers end at about the same time.
    """
    trains = next((item.path for item in items if uses_shared_jobs(item)), None)
    shared = {item.path for item in items if uses_shared_jobs(item)}
    launched = {item.path for item in items if item.get_closest_marker("launched")} - shared
    others = [path for path in dict.fromkeys(item.path for item in items) if path not in shared | launched]
    stages = ({trains}, launched, set(others[::2]), shared, set(others))
    items.sort(key=lambda item: next(i for i, paths in enumerate(stages) if item.path in paths))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU: torch.cuda.is_available() is False"))


@pytest.fixture(scope="session")
def real_csv() -> Path:
    """The real hotel reviews, for tests of facts about that file. It is not part of the repository."""
    return find_real_csv() or unavailable("no real CSV: run python -m app.data.download, or set CHNSENTICORP_CSV")


@pytest.fixture(scope="session")
def hotel_csv(request: pytest.FixtureRequest) -> Path:
    """Hotel reviews to train on: the real ones if available (CI requires them), otherwise the bundled sample."""
    if find_real_csv() is None and not in_ci():
        return SAMPLE_CSV
    path: Path = request.getfixturevalue("real_csv")
    return path


@pytest.fixture(scope="session")
def shared_jobs(
    request: pytest.FixtureRequest, hotel_csv: Path, tmp_path_factory: pytest.TempPathFactory
) -> SharedJobs:
    """The jobs that test files share, also those that run in other workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return SharedJobs(base / "shared-jobs", hotel_csv, request.session.items)


@pytest.fixture(scope="module")
def shared_folder(request: pytest.FixtureRequest, shared_jobs: SharedJobs) -> Path:
    """The folder of this file's runs in shared jobs."""
    return shared_jobs.folder(request.module)


@pytest.fixture(scope="module")
def trained_by(request: pytest.FixtureRequest, shared_jobs: SharedJobs) -> Callable[[str], dict[str, Outcome]]:
    """A function that returns the outcomes of this file's runs in a shared job: `trained_by("two_ranks")`."""
    return lambda job: shared_jobs.train(request.module, job)


@pytest.fixture
def review_csv(tmp_path: Path) -> Callable[..., Path]:
    """Write a small CSV whose classes differ in their words: `review_csv(rows)` returns its path."""

    def write(rows: int = 60, name: str = "reviews.csv", classes: tuple[Any, ...] = (0, 1)) -> Path:
        path = tmp_path / name
        write_reviews(path, rows, classes)
        return path

    return write


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Finished]:
    """Run a program in real processes: `launch("ddp_loop", "--max_steps", 3, ranks=2)`. Arguments as for `Job`."""

    def run(program: str, *flags: Any, ranks: int = 0, limit: float = LIMIT, **environment: str) -> Finished:
        with Job(program, *flags, cwd=tmp_path, ranks=ranks, **environment) as job:
            return job.finish(limit)

    return run


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A process group of one rank, in this process."""
    with patch.dict(os.environ):  # in which a rank without torchrun leaves its number
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        with join(Settings(use_cpu=True, threads=1)) as world:
            yield world


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """The names of two network namespaces, of the addresses 10.77.0.1 and 10.77.0.2, that a virtual cable connects."""
    try:
        with network_namespaces() as names:
            connect(names)
            yield names
    except NamespacesUnavailable as refusal:
        unavailable(str(refusal))
    assert not set(names) & set(ip("netns", "list").stdout.split())


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a tmpfs in the test's folder: `mount("size=1m")` returns its path."""
    mounted = []

    def of(options: str) -> Path:
        place = tmp_path / f"mount-{len(mounted)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as refusal:
            unavailable(f"needs root to mount a tmpfs: {refusal}")
        mounted.append(place)
        return place

    yield of
    for place in mounted:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
