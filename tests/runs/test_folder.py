"""Only a folder without results becomes the folder of a run."""

from __future__ import annotations

import pytest

from app.common.errors import UserError
from app.runs.folder import create_folder, reject_used
from app.runs.schema import LOCK, METRICS


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
