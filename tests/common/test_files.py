"""Atomic writes and files of the cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.common import files
from app.common.files import cached_file, commit, write_text


@pytest.fixture
def operations(monkeypatch) -> list[tuple[str, str]]:
    """Record the flushes and renames, in order."""
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


def test_a_folder_and_all_its_files_are_flushed_before_the_rename(tmp_path, operations):
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


def test_a_folder_replaces_a_link_and_not_what_it_links_to(tmp_path):
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "weights").write_text("old")
    (tmp_path / "model").symlink_to("archive")
    (tmp_path / ".model.tmp").mkdir()
    commit(tmp_path / ".model.tmp", tmp_path / "model")
    assert not (tmp_path / "model").is_symlink()
    assert (tmp_path / "archive" / "weights").read_text() == "old"


def test_a_text_file_is_flushed_before_the_rename_and_its_folder_after_it(tmp_path, operations):
    write_text(tmp_path / "metrics.json", "{}")
    assert operations == [("flush", ".metrics.json.tmp"), ("rename", "metrics.json"), ("flush", tmp_path.name)]


def test_a_cached_file_is_written_once_and_an_interrupted_one_leaves_nothing(tmp_path):
    def fail_halfway(file: Path) -> None:
        assert file.parent.parent == tmp_path, "on the same file system, so that a rename moves it"
        file.write_text("partial")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cached_file(tmp_path / "tokens.arrow", fail_halfway)
    assert list(tmp_path.iterdir()) == []
    for content in ("first", "second"):
        cached_file(tmp_path / "tokens.arrow", lambda file, content=content: file.write_text(content))
    assert [path.read_text() for path in tmp_path.iterdir()] == ["first"]
