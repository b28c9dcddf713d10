"""Atomic writes and staging folders."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.jobs import PROJECT

from app.common import files
from app.common.files import commit, staging_folder, write_text


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


def test_a_staging_folder_is_removed_even_after_an_error(tmp_path):
    def fail_halfway() -> None:
        with staging_folder(tmp_path / "tokens.arrow") as folder:
            assert folder.parent == tmp_path
            (folder / "tokens.arrow").write_text("partial")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_halfway()
    assert list(tmp_path.iterdir()) == []


WRITE_UNTIL_KILLED = """
import pathlib, sys
from app.common.files import staging_folder
with staging_folder(pathlib.Path(sys.argv[1])) as folder:
    (folder / "partial").write_text("partial")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_the_staging_folder_of_a_killed_process_is_removed_but_not_that_of_a_running_one(tmp_path):
    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WRITE_UNTIL_KILLED, str(tmp_path / "tokens.arrow")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen(command, cwd=PROJECT, text=True, **pipes)

    with start() as killed, start() as running:
        left, kept = Path(killed.stdout.readline().strip()), Path(running.stdout.readline().strip())
        killed.send_signal(signal.SIGKILL)
        killed.wait(30)
        assert (left / "partial").exists()
        with staging_folder(tmp_path / "other.arrow") as own:
            assert not left.exists()
            assert {path for path in tmp_path.iterdir() if path.is_dir()} == {kept, own}
        running.communicate(timeout=30)
        assert running.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_another_process_takes_for_stale_is_created_again(tmp_path, monkeypatch):
    removed = []
    flock = files.fcntl.flock

    def remove_first_lock(descriptor: int, operation: int) -> None:
        if not removed:  # between open and flock
            removed.extend(tmp_path.glob("*.lock"))
            removed[0].unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(files.fcntl, "flock", remove_first_lock)
    with staging_folder(tmp_path / "tokens.arrow") as folder:
        assert removed == list(tmp_path.glob("*.lock")), "the lock exists again, under the same name"
        assert folder.is_dir()
