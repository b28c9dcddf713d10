"""A folder is a valid checkpoint or none, whatever happens to the disk or the process while it is written."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.checkpoint import manager
from app.checkpoint.manager import (
    COMPLETION_MARKER,
    CheckpointManager,
    commit_checkpoint,
    latest_first,
    latest_valid_checkpoint,
    problem_of,
    remove,
)
from app.common.errors import RunError
from app.distributed.world import World

FILES = {"model.safetensors": b"weights" * 40, "run_state.json": b'{"step": 1}', "deeper/rng.bin": b"\x00\xff" * 30}


def write(folder: Path, salt: bytes = b"") -> None:
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content + salt)


def committed(folder: Path) -> Path:
    staging = folder.parent / manager.STAGING / folder.name
    write(staging, folder.name.encode())
    commit_checkpoint(staging, folder)
    return folder


def ignore(text: str) -> None:
    pass


def test_a_committed_checkpoint_is_valid_and_its_staging_directory_is_gone(tmp_path):
    folder = committed(tmp_path / "checkpoint-7")
    assert problem_of(folder) is None
    assert latest_valid_checkpoint(tmp_path, ignore) == folder
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-7"}
    assert (folder / "deeper" / "rng.bin").read_bytes() == FILES["deeper/rng.bin"] + b"checkpoint-7"


def test_a_second_checkpoint_of_the_same_step_replaces_the_first(tmp_path):
    committed(tmp_path / "checkpoint-7")
    (tmp_path / "checkpoint-7" / "stale").touch()
    assert problem_of(committed(tmp_path / "checkpoint-7")) is None
    assert not (tmp_path / "checkpoint-7" / "stale").exists()


@pytest.mark.parametrize("is_dangling", [False, True])
def test_a_link_is_removed_or_replaced_but_not_the_checkpoint_that_it_links_to(tmp_path, is_dangling):
    archived, link = committed(tmp_path / "archive" / "checkpoint-7"), tmp_path / "checkpoint-7"
    if is_dangling:
        archived = archived.rename(archived.with_name("elsewhere"))
    for replace in (remove, committed):
        link.symlink_to("archive/checkpoint-7")
        replace(link)
        assert not link.is_symlink()
        assert problem_of(archived) is None
    assert problem_of(link) is None


def test_steps_are_ordered_as_numbers_and_other_names_are_ignored(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-final", "best-11"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-12").touch()
    assert [path.name for path in latest_first(tmp_path)] == ["checkpoint-10", "checkpoint-9"]
    assert latest_first(tmp_path / "none") == []


@pytest.mark.parametrize("name", ["manifest.json", COMPLETION_MARKER, *FILES])
def test_a_missing_file_is_named(tmp_path, name):
    folder = committed(tmp_path / "checkpoint-1")
    (folder / name).unlink()
    assert problem_of(folder) == f"{Path(name).name} is missing"


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    for step in (5, 10):
        committed(folder / f"checkpoint-{step}")
    return folder


def every_byte(folder: Path) -> list[tuple[str, int]]:
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    return [(name, place) for name in names for place in range((folder / name).stat().st_size)]


def assert_skipped(folder: Path, name: str) -> None:
    reported: list[str] = []
    assert latest_valid_checkpoint(folder, reported.append) == folder / "checkpoint-5"
    assert len(reported) == 1
    assert "checkpoint-10 is skipped: " in reported[0]


def test_a_flipped_bit_in_any_byte_is_detected_and_the_previous_checkpoint_is_used(pair):
    for number, (name, place) in enumerate(every_byte(pair / "checkpoint-10")):
        path = pair / "checkpoint-10" / name
        original = path.read_bytes()
        broken = bytearray(original)
        broken[place] ^= 1 << number % 8
        path.write_bytes(broken)
        try:
            assert_skipped(pair, name)
        finally:
            path.write_bytes(original)
    assert latest_valid_checkpoint(pair, ignore) == pair / "checkpoint-10"


def test_a_file_truncated_anywhere_is_detected_and_the_previous_checkpoint_is_used(pair):
    for name, place in every_byte(pair / "checkpoint-10"):
        path = pair / "checkpoint-10" / name
        original = path.read_bytes()
        path.write_bytes(original[:place])
        try:
            assert_skipped(pair, name)
        finally:
            path.write_bytes(original)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(data=st.data())
def test_any_changed_content_is_detected(pair, data):
    names = sorted({name for name, _ in every_byte(pair / "checkpoint-10")})
    path = pair / "checkpoint-10" / data.draw(st.sampled_from(names))
    original = path.read_bytes()
    other = data.draw(st.binary(max_size=2 * len(original)) | st.permutations(list(original)).map(bytes))
    path.write_bytes(other)
    try:
        assert (problem_of(path.parents[len(path.relative_to(pair / "checkpoint-10").parts) - 1]) is None) == (
            other == original
        )
    finally:
        path.write_bytes(original)


# ---- killed, or out of disk, between any two operations --------------------------------------------------------------


class Killed(BaseException):
    """Caught by no `except` of the application, like SIGKILL."""


OPERATIONS = ((os, "rename"), (os, "fsync"), (os, "unlink"), (os, "rmdir"), (os, "mkdir"), (os, "open"))


def break_at(monkeypatch: pytest.MonkeyPatch, k: int, what: type[BaseException]) -> list[str]:
    """Make the k-th file system operation from now on raise; if it raises `Killed`, so do all later operations."""
    done: list[str] = []

    def broken(name, original):
        def operation(*arguments, **keywords):
            done.append(name)
            if len(done) == k or (len(done) > k and what is Killed):
                raise what(28, "No space left on device")
            return original(*arguments, **keywords)

        return operation

    for module, name in OPERATIONS:
        monkeypatch.setattr(module, name, broken(name, getattr(module, name)))
    monkeypatch.setattr(manager, "_write", broken("write", manager._write))
    return done


def valid_ones(folder: Path) -> list[str]:
    return [path.name for path in latest_first(folder) if problem_of(path) is None]


def count_operations(folder: Path, world: World) -> int:
    with pytest.MonkeyPatch.context() as patch:
        done = break_at(patch, 0, OSError)
        CheckpointManager(folder, 2, "continue", world=world).save("checkpoint-3", write, FILES)
        return len(done)


@pytest.mark.parametrize("what", [Killed, OSError])
def test_a_kill_or_a_full_disk_at_any_operation_of_a_save_leaves_only_valid_checkpoints(tmp_path, world, what):
    (tmp_path / "probe").mkdir()
    for step in (1, 2):
        committed(tmp_path / "probe" / f"checkpoint-{step}")
    operations = count_operations(tmp_path / "probe", world)
    assert operations > 12, "too few to be all"
    seen = set()
    for k in range(1, operations + 1):
        folder = tmp_path / f"{k}"
        folder.mkdir()
        for step in (1, 2):
            committed(folder / f"checkpoint-{step}")
        checkpoints = CheckpointManager(folder, 2, "continue", world=world)
        written = False
        with pytest.MonkeyPatch.context() as patch:
            break_at(patch, k, what)
            with suppress(Killed):
                written = checkpoints.save("checkpoint-3", write, FILES)
        left = valid_ones(folder)
        seen.add(tuple(left))
        assert left[:1] in (["checkpoint-2"], ["checkpoint-3"])
        assert "checkpoint-2" in left, "the latest valid checkpoint was removed"
        assert latest_valid_checkpoint(folder, ignore) == folder / left[0]
        assert not written or left[0] == "checkpoint-3"
        if what is OSError and not written:
            assert [path.name for path in latest_first(folder)] == left, "an incomplete checkpoint was left"
        assert checkpoints.save("checkpoint-4", write, FILES), "the next checkpoint could not be written"
        assert valid_ones(folder)[0] == "checkpoint-4"
    assert {left[0] for left in seen} == {"checkpoint-2", "checkpoint-3"}


# ---- rotation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_the_latest_checkpoints_are_kept(tmp_path, world, limit):
    checkpoints = CheckpointManager(tmp_path / "checkpoints", limit, "continue", world=world)
    for step in range(1, 6):
        assert checkpoints.save(f"checkpoint-{step * 5}", write, FILES)
        assert checkpoints.latest_valid == checkpoints.folder / f"checkpoint-{step * 5}"
        assert len(valid_ones(checkpoints.folder)) == min(step, limit)
    assert valid_ones(checkpoints.folder) == [f"checkpoint-{step * 5}" for step in range(5, 5 - limit, -1)]


def test_an_invalid_new_checkpoint_does_not_remove_the_latest_valid_one(tmp_path, world, monkeypatch):
    checkpoints = CheckpointManager(tmp_path / "checkpoints", 1, "continue", world=world)
    assert checkpoints.save("checkpoint-1", write, FILES)
    write_file = manager._write

    def damaging(path: Path, content: bytes) -> None:
        write_file(path, content)
        if path.name == COMPLETION_MARKER:  # a disk that reports no error
            (path.parent / "model.safetensors").write_bytes(b"something else")

    monkeypatch.setattr(manager, "_write", damaging)
    assert not checkpoints.save("checkpoint-2", write, FILES)
    assert valid_ones(checkpoints.folder) == ["checkpoint-1"]
    assert checkpoints.latest_valid == checkpoints.folder / "checkpoint-1"


def test_a_failure_names_a_checkpoint_that_was_completed_right_before_it(tmp_path, world):
    """Rank 0 was killed before the other ranks knew."""
    checkpoints = CheckpointManager(tmp_path / "checkpoints", 9, "continue", world=world)
    assert checkpoints.find_latest_valid() is None
    assert checkpoints.save("checkpoint-1", write, FILES)
    committed(checkpoints.folder / "checkpoint-2")
    damaged = committed(checkpoints.folder / "checkpoint-3")
    (damaged / COMPLETION_MARKER).write_bytes(b"")
    assert checkpoints.find_latest_valid() == checkpoints.folder / "checkpoint-2"
    remove(checkpoints.folder / "checkpoint-2")
    assert checkpoints.find_latest_valid() == checkpoints.folder / "checkpoint-1"
    remove(checkpoints.folder / "checkpoint-1")
    assert checkpoints.find_latest_valid() is None


def test_a_folder_that_cannot_be_read_does_not_replace_the_failure(tmp_path, world, monkeypatch):
    checkpoints = CheckpointManager(tmp_path / "checkpoints", 9, "continue", world=world)
    assert checkpoints.save("checkpoint-1", write, FILES)

    def refuse(folder: Path) -> list[Path]:
        raise PermissionError(folder)

    monkeypatch.setattr(manager, "latest_first", refuse)
    assert checkpoints.find_latest_valid() == checkpoints.folder / "checkpoint-1"


@pytest.mark.parametrize("marker", [b"", b"5d41"])
def test_a_marker_that_was_not_written_completely_is_named(tmp_path, marker):
    folder = committed(tmp_path / "checkpoint-1")
    (folder / COMPLETION_MARKER).write_bytes(marker)
    assert problem_of(folder) == f"{COMPLETION_MARKER} has {len(marker)} bytes, not 64"


def test_a_failure_is_one_line_and_stops_the_run_if_requested(tmp_path, world, capsys):
    def full(folder: Path) -> None:
        (folder / "half").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    checkpoints = CheckpointManager(tmp_path / "checkpoints", 2, "continue", world=world)
    assert checkpoints.save("checkpoint-1", write, FILES)
    assert not checkpoints.save("checkpoint-2", full, FILES)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1
    for part in ("checkpoint-2 could not be written", "No space left on device", "checkpoint-1", "training continues"):
        assert part in printed[0]
    checkpoints.on_failure = "stop"
    with pytest.raises(RunError, match=r"No space left on device.*latest valid checkpoint is .*checkpoint-1"):
        checkpoints.save("checkpoint-2", full, FILES)
    assert [path.name for path in checkpoints.folder.rglob("half")] == []


@pytest.mark.parametrize("missing", FILES)
def test_a_checkpoint_that_lacks_a_required_file_is_not_marked_complete(tmp_path, world, capsys, missing):
    def write_all_but_one(folder: Path) -> None:
        write(folder)
        (folder / missing).unlink()

    checkpoints = CheckpointManager(tmp_path / "checkpoints", 2, "continue", world=world)
    assert not checkpoints.save("checkpoint-1", write_all_but_one, FILES)
    assert latest_valid_checkpoint(checkpoints.folder, ignore) is None
    assert f"{missing} was not written" in capsys.readouterr().out
    assert checkpoints.save("checkpoint-1", write, FILES)


def test_a_run_folder_that_is_gone_is_not_created_again(tmp_path, world):
    run = tmp_path / "run"
    run.mkdir()
    checkpoints = CheckpointManager(run / "checkpoints", 2, "continue", world=world)
    assert checkpoints.save("checkpoint-1", write, FILES)
    shutil.rmtree(run)
    assert not checkpoints.save("checkpoint-2", write, FILES)
    assert not run.exists()


def test_the_completion_marker_is_removed_first(tmp_path, monkeypatch):
    folder = committed(tmp_path / "checkpoint-1")
    monkeypatch.setattr(shutil, "rmtree", lambda *arguments, **keywords: None)  # killed in between
    remove(folder)
    assert problem_of(folder) == f"{COMPLETION_MARKER} is missing"
