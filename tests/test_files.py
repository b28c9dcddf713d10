"""What has a name is on disk, and one folder belongs to one job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app import files
from app.files import commit, write_text


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
