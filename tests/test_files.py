"""What has a name is on disk, and one folder belongs to one job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app import files
from app.errors import UserError
from app.files import claim_folder, commit, create_folder, write_text


@pytest.fixture
def operations(monkeypatch) -> list[tuple[str, str]]:
    """Records what is flushed to disk and what is renamed, in order."""
    done: list[tuple[str, str]] = []
    flush, replace = files.flush, os.replace

    def recorded_flush(path: Path) -> None:
        done.append(("flush", path.name))
        flush(path)

    def recorded_replace(source: Path, target: Path) -> None:
        done.append(("rename", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(files, "flush", recorded_flush)
    monkeypatch.setattr(os, "replace", recorded_replace)
    return done


def test_a_folder_is_flushed_with_all_its_files_before_it_has_its_name(tmp_path, operations):
    staging = tmp_path / ".model.tmp"
    (staging / "deeper").mkdir(parents=True)
    (staging / "weights").write_text("new")
    (staging / "deeper" / "vocabulary").write_text("new")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("old")
    commit(staging, tmp_path / "model")
    assert (tmp_path / "model" / "weights").read_text() == "new"
    renamed = operations.index(("rename", "model"))
    assert {name for _, name in operations[:renamed]} == {"weights", "vocabulary", "deeper", ".model.tmp"}
    assert operations[renamed + 1 :] == [("flush", tmp_path.name)]


def test_a_text_file_is_flushed_before_and_its_folder_after_the_rename(tmp_path, operations):
    write_text(tmp_path / "metrics.json", "{}")
    assert operations == [("flush", ".metrics.json.tmp"), ("rename", "metrics.json"), ("flush", tmp_path.name)]


@pytest.mark.parametrize("create", [create_folder, claim_folder])
def test_the_names_of_new_folders_are_flushed(tmp_path, operations, create):
    create(str(tmp_path / "a" / "b" / "run"), tmp_path)
    assert {("flush", name) for name in (tmp_path.name, "a", "b")} <= set(operations)
    operations.clear()
    create(None, tmp_path / "c" / "runs")
    assert {("flush", name) for name in (tmp_path.name, "c", "runs")} <= set(operations)


def test_a_folder_that_another_job_used_before_the_lock_was_taken_is_refused(tmp_path, monkeypatch):
    """Between the first look and the lock, another job may have started, finished and released its lock."""
    lock = files.lock

    def lock_late(folder: Path) -> int:
        (folder / "metrics.json").touch()
        return lock(folder)

    monkeypatch.setattr(files, "lock", lock_late)
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        claim_folder(str(tmp_path / "run"), tmp_path)


def test_a_claimed_folder_is_locked_and_latest_is_left_to_the_caller(tmp_path):
    folder, descriptor = claim_folder(None, tmp_path)
    with pytest.raises(UserError, match="has not ended"):
        files.lock(folder)
    os.close(descriptor)
    assert not (tmp_path / "latest").exists()
    files.point_latest(folder)
    assert (tmp_path / "latest").resolve() == folder.resolve()
