"""A log on a full disk: no line is lost, none is torn."""

from __future__ import annotations

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import metrics_log
from app.metrics_log import MetricsLog


class Disk:
    """A disk with so many bytes left, in place of the file that a log opens."""

    def __init__(self, room: int) -> None:
        self.room, self.content = room, b""

    def open(self, mode: str, buffering: int) -> Disk:
        assert (mode, buffering) == ("ab", 0)
        return self

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def seek(self, offset: int, whence: int) -> int:
        assert (offset, whence) == (0, os.SEEK_END)
        return len(self.content)

    def write(self, content: bytes) -> int:
        taken = content[: self.room]
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= len(taken)
        self.content += taken
        return len(taken)

    def truncate(self, size: int) -> None:
        self.room += len(self.content) - size
        self.content = self.content[:size]


@given(
    lines=st.lists(st.text("abé好", max_size=9).map(lambda text: text + "\n"), max_size=12),
    rooms=st.lists(st.integers(0, 30), min_size=12, max_size=12),
)
def test_the_file_is_always_a_prefix_of_whole_lines_and_complete_once_there_is_room(lines, rooms):
    disk = Disk(0)
    log = MetricsLog(disk)
    for number, (line, room) in enumerate(zip(lines, rooms, strict=False), start=1):
        disk.room += room
        try:
            log.append(line)
            written = number
        except OSError:
            written = None
        whole = "".join(lines[:number]).encode()
        assert whole.startswith(disk.content)
        assert disk.content + log.pending == whole
        assert not disk.content or disk.content.endswith(b"\n")
        assert written is None or disk.content == whole
    disk.room += 10_000
    log.append("")
    assert disk.content == "".join(lines).encode()


def test_a_log_goes_on_after_what_is_there(tmp_path):
    (tmp_path / "steps.jsonl").write_text("1\n")
    log = MetricsLog(tmp_path / "steps.jsonl")
    log.append("2\n")
    log.append("")
    assert (tmp_path / "steps.jsonl").read_text() == "1\n2\n"
    assert metrics_log.MetricsLog(tmp_path / "none").pending == b""


def test_a_folder_that_is_gone_is_not_created(tmp_path):
    log = MetricsLog(tmp_path / "gone" / "steps.jsonl")
    with pytest.raises(FileNotFoundError):
        log.append("1\n")
    assert log.pending == b"1\n"
    assert not (tmp_path / "gone").exists()
