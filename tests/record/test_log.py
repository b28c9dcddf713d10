"""A log on a full disk: no line is lost or incomplete."""

from __future__ import annotations

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.record.log import MetricsLog


class Disk:
    """A disk with `room` bytes left. It takes the place of the file that a log opens."""

    def __init__(self, room: int) -> None:
        self.room, self.content = room, b""
        self.fails_at_close = self.fails_to_truncate = False

    def open(self, mode: str, buffering: int) -> Disk:
        assert (mode, buffering) == ("ab", 0)
        return self

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, problem: object, *_: object) -> None:
        if self.fails_at_close and problem is None:  # as NFS does when a quota is exceeded
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    def seek(self, offset: int, whence: int) -> int:
        assert (offset, whence) == (0, os.SEEK_END)
        return len(self.content)

    def write(self, content: bytes) -> int:
        accepted = content[: self.room]
        if not accepted:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= len(accepted)
        self.content += accepted
        return len(accepted)

    def truncate(self, size: int) -> None:
        if self.fails_to_truncate and size < len(self.content):
            raise OSError(errno.EIO, "Input/output error")
        self.room += len(self.content) - size
        self.content = self.content[:size]


@given(
    lines=st.lists(st.text("abé好", max_size=9).map(lambda text: text + "\n"), max_size=12),
    rooms=st.lists(st.integers(0, 30), min_size=12, max_size=12),
)
def test_the_file_is_always_a_prefix_of_complete_lines_and_catches_up_once_there_is_room(lines, rooms):
    disk = Disk(0)
    log = MetricsLog(disk)
    for number, (line, room) in enumerate(zip(lines, rooms, strict=False), start=1):
        disk.room += room
        try:
            log.append(line)
            written = number
        except OSError:
            written = None
        expected = "".join(lines[:number]).encode()
        assert expected.startswith(disk.content)
        assert disk.content + log.pending == expected
        assert not disk.content or disk.content.endswith(b"\n")
        assert written is None or disk.content == expected
    disk.room += 10_000
    log.append("")
    assert disk.content == "".join(lines).encode()


def test_no_line_is_repeated_if_a_failure_is_reported_only_when_the_file_is_closed():
    disk = Disk(100)
    log = MetricsLog(disk)
    log.append("1\n")
    disk.fails_at_close = True
    with pytest.raises(OSError, match="quota"):
        log.append("2\n")
    disk.fails_at_close = False
    log.append("3\n")
    assert disk.content == b"1\n2\n3\n"


def test_an_incomplete_line_that_could_not_be_removed_is_removed_later():
    disk = Disk(3)
    log = MetricsLog(disk)
    log.append("1\n")
    disk.fails_to_truncate = True
    with pytest.raises(OSError, match="No space left"):
        log.append("2\n")
    assert disk.content == b"1\n2"
    disk.fails_to_truncate, disk.room = False, 100
    log.append("3\n")
    assert disk.content == b"1\n2\n3\n"


def test_an_existing_log_is_continued(tmp_path):
    (tmp_path / "steps.jsonl").write_text("1\n")
    log = MetricsLog(tmp_path / "steps.jsonl")
    log.append("2\n")
    log.append("")
    assert (tmp_path / "steps.jsonl").read_text() == "1\n2\n"


def test_a_folder_that_is_gone_is_not_created(tmp_path):
    log = MetricsLog(tmp_path / "gone" / "steps.jsonl")
    with pytest.raises(FileNotFoundError):
        log.append("1\n")
    assert log.pending == b"1\n"
    assert not (tmp_path / "gone").exists()
