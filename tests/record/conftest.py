"""Fixtures that open run records without training."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from record.record_fixtures import new_record  # noqa: F401
from record.run_records import begin

from app.checkpoint.resume import Resume
from app.record.run_record import RunRecord


@pytest.fixture
def started(new_record) -> Callable[..., RunRecord]:  # noqa: F811
    """Open and begin a run with these settings."""

    def start(resume: Resume | None = None, **settings: Any) -> RunRecord:
        record, plan = new_record(resume, **settings)
        begin(record, plan)
        return record

    return start


@contextmanager
def limit_file_sizes(size: int) -> Iterator[None]:
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


@pytest.fixture
def files_up_to() -> Callable[[int], AbstractContextManager[None]]:
    """Files may have so many bytes in the block: writing more fails in the middle, as on a full disk."""
    return limit_file_sizes
