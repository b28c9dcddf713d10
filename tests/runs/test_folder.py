"""A run folder belongs to one job."""

from __future__ import annotations

import os

import pytest

from app.common.errors import UserError
from app.runs.folder import create_folder, lock, point_latest, reject_used
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


def test_folders_of_the_same_second_are_different(tmp_path):
    folders = [create_folder(None, tmp_path / "new") for _ in range(3)]
    assert sorted((tmp_path / "new").iterdir()) == sorted(set(folders)) == folders


def test_a_folder_that_cannot_be_created_is_one_line(tmp_path):
    (tmp_path / "link").symlink_to("missing")
    (tmp_path / "file").touch()
    for name in ("link", "file/run"):
        with pytest.raises(UserError, match=f"^--output_dir .*{name}: cannot be written: "):
            create_folder(str(tmp_path / name), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_latest_points_to_the_last_folder(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        point_latest(tmp_path / name)
    assert (tmp_path / LATEST).resolve() == (tmp_path / "second").resolve()


def test_a_locked_folder_is_in_use_until_it_is_unlocked(tmp_path):
    descriptor = lock(tmp_path)
    with pytest.raises(UserError, match="has not ended"):
        lock(tmp_path)
    os.close(descriptor)
    os.close(lock(tmp_path))
