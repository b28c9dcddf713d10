"""A run folder belongs to one job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.common.errors import UserError
from app.runs import folder as run_folder
from app.runs.folder import claim_folder
from app.runs.schema import LATEST, METRICS


def test_a_folder_that_another_job_used_before_the_lock_was_taken_is_rejected(tmp_path, monkeypatch):
    """Between the first check and the lock, another job may have started, finished and released its lock."""
    lock = run_folder.lock

    def lock_late(folder: Path) -> int:
        (folder / METRICS.name).touch()
        return lock(folder)

    monkeypatch.setattr(run_folder, "lock", lock_late)
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        claim_folder(str(tmp_path / "run"), tmp_path)


def test_claiming_a_folder_locks_it_and_leaves_latest_alone(tmp_path):
    folder, descriptor = claim_folder(None, tmp_path)
    with pytest.raises(UserError, match="has not ended"):
        run_folder.lock(folder)
    os.close(descriptor)
    assert not (tmp_path / LATEST).exists()
    run_folder.point_latest(folder)
    assert (tmp_path / LATEST).resolve() == folder.resolve()
