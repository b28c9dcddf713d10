"""A run folder belongs to one job."""

from __future__ import annotations

import os

import pytest

from app.common.errors import UserError
from app.runs.folder import create_folder, lock, reject_used
from app.runs.schema import LATEST, LOCK, METRICS


def test_only_a_folder_without_results_is_accepted(tmp_path):
    """What a run leaves that was killed at its start is no result."""
    for name in (LOCK, ".settings.json.tmp"):
        (tmp_path / name).touch()
        assert create_folder(str(tmp_path), tmp_path) == tmp_path
    (tmp_path / METRICS.name).touch()
    for used in (tmp_path, tmp_path / METRICS.name):
        with pytest.raises(UserError, match="exists and is not an empty folder"):
            reject_used(str(used))


def test_folders_of_the_same_second_are_different_and_latest_points_to_the_last_one(tmp_path):
    folders = [create_folder(None, tmp_path / "new") for _ in range(3)]
    assert len({folder.resolve() for folder in folders}) == 3
    assert (tmp_path / "new" / LATEST).resolve() == folders[-1].resolve()
    assert create_folder(None, tmp_path / "new", latest=False).resolve() not in folders
    assert (tmp_path / "new" / LATEST).resolve() == folders[-1].resolve()


def test_a_locked_folder_is_in_use_until_it_is_unlocked(tmp_path):
    descriptor = lock(tmp_path)
    with pytest.raises(UserError, match="has not ended"):
        lock(tmp_path)
    os.close(descriptor)
    os.close(lock(tmp_path))
