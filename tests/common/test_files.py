"""Atomic writes."""

from __future__ import annotations

import os

from app.common import files
from app.common.files import commit


def test_a_folder_and_all_its_files_are_flushed_before_the_rename(tmp_path, monkeypatch):
    done: list[tuple[str, str]] = []
    flush, replace = files.flush, os.replace
    monkeypatch.setattr(files, "flush", lambda path: (done.append(("flush", path.name)), flush(path)))
    monkeypatch.setattr(os, "replace", lambda source, to: (done.append(("rename", to.name)), replace(source, to)))
    for folder in (".model.tmp/deeper", "model"):
        (tmp_path / folder).mkdir(parents=True)
    for file in (".model.tmp/weights", ".model.tmp/deeper/vocabulary", "model/weights"):
        (tmp_path / file).write_text("old" if file.startswith("model") else "new")
    commit(tmp_path / ".model.tmp", tmp_path / "model")
    assert (tmp_path / "model" / "weights").read_text() == "new"
    renamed = done.index(("rename", "model"))
    assert {name for _, name in done[:renamed]} == {"weights", "vocabulary", "deeper", ".model.tmp"}
    assert done[renamed + 1 :] == [("flush", tmp_path.name)]


def test_a_folder_replaces_a_link_and_not_what_it_links_to(tmp_path):
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "weights").write_text("old")
    (tmp_path / "model").symlink_to("archive")
    (tmp_path / ".model.tmp").mkdir()
    commit(tmp_path / ".model.tmp", tmp_path / "model")
    assert not (tmp_path / "model").is_symlink()
    assert (tmp_path / "archive" / "weights").read_text() == "old"
