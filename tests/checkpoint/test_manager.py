"""A checkpoint is whole or it is none, whatever happens to the disk or the process while it is written or kept."""

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
from app.distributed.world import World
from app.errors import RunError

FILES = {"model.safetensors": b"weights" * 40, "run_state.json": b'{"step": 1}', "deeper/rng.bin": b"\x00\xff" * 30}


def fill(folder: Path, salt: bytes = b"") -> None:
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content + salt)


def sealed(folder: Path) -> Path:
    aside = folder.parent / manager.STAGING / folder.name
    fill(aside, folder.name.encode())
    commit_checkpoint(aside, folder)
    return folder


def silent(text: str) -> None:
    pass


def test_a_sealed_checkpoint_is_whole_and_nothing_is_left_aside(tmp_path):
    folder = sealed(tmp_path / "checkpoint-7")
    assert problem_of(folder) is None
    assert latest_valid_checkpoint(tmp_path, silent) == folder
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-7"}
    assert (folder / "deeper" / "rng.bin").read_bytes() == FILES["deeper/rng.bin"] + b"checkpoint-7"


def test_a_second_seal_of_the_same_step_takes_the_place_of_the_first(tmp_path):
    sealed(tmp_path / "checkpoint-7")
    (tmp_path / "checkpoint-7" / "stale").touch()
    assert problem_of(sealed(tmp_path / "checkpoint-7")) is None
    assert not (tmp_path / "checkpoint-7" / "stale").exists()


def test_steps_are_ordered_as_numbers_and_other_names_are_no_checkpoints(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-final", "best-11"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-12").touch()
    assert [path.name for path in latest_first(tmp_path)] == ["checkpoint-10", "checkpoint-9"]
    assert latest_first(tmp_path / "none") == []


@pytest.mark.parametrize("name", ["manifest.json", COMPLETION_MARKER, *FILES])
def test_a_missing_file_is_named(tmp_path, name):
    folder = sealed(tmp_path / "checkpoint-1")
    (folder / name).unlink()
    assert problem_of(folder) == f"{Path(name).name} is missing"


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    for step in (5, 10):
        sealed(folder / f"checkpoint-{step}")
    return folder


def every_byte(folder: Path) -> list[tuple[str, int]]:
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    return [(name, place) for name in names for place in range((folder / name).stat().st_size)]


def assert_passed_over(folder: Path, name: str) -> None:
    told: list[str] = []
    assert latest_valid_checkpoint(folder, told.append) == folder / "checkpoint-5"
    assert len(told) == 1
    assert "checkpoint-10 is passed over: " in told[0]


def test_one_flipped_bit_in_any_byte_of_any_file_is_seen_and_the_one_before_is_used(pair):
    for number, (name, place) in enumerate(every_byte(pair / "checkpoint-10")):
        path = pair / "checkpoint-10" / name
        whole = path.read_bytes()
        broken = bytearray(whole)
        broken[place] ^= 1 << number % 8
        path.write_bytes(broken)
        try:
            assert_passed_over(pair, name)
        finally:
            path.write_bytes(whole)
    assert latest_valid_checkpoint(pair, silent) == pair / "checkpoint-10"


def test_a_file_cut_short_anywhere_is_seen_and_the_one_before_is_used(pair):
    for name, place in every_byte(pair / "checkpoint-10"):
        path = pair / "checkpoint-10" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:place])
        try:
            assert_passed_over(pair, name)
        finally:
            path.write_bytes(whole)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(data=st.data())
def test_any_other_content_of_any_file_is_seen(pair, data):
    names = sorted({name for name, _ in every_byte(pair / "checkpoint-10")})
    path = pair / "checkpoint-10" / data.draw(st.sampled_from(names))
    whole = path.read_bytes()
    other = data.draw(st.binary(max_size=2 * len(whole)) | st.permutations(list(whole)).map(bytes))
    path.write_bytes(other)
    try:
        assert (problem_of(path.parents[len(path.relative_to(pair / "checkpoint-10").parts) - 1]) is None) == (
            other == whole
        )
    finally:
        path.write_bytes(whole)


# ---- killed, or out of disk, between any two operations --------------------------------------------------------------


class Killed(BaseException):
    """What no `except` of ours catches: as SIGKILL."""


OPERATIONS = ((os, "rename"), (os, "fsync"), (os, "unlink"), (os, "rmdir"), (os, "mkdir"), (os, "open"))


def break_at(monkeypatch: pytest.MonkeyPatch, k: int, what: type[BaseException]) -> list[str]:
    """The k-th of all file system operations from here on raises, and so do all after it where it is a death."""
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
    write = manager._write
    monkeypatch.setattr(manager, "_write", broken("write", write))
    return done


def whole_ones(folder: Path) -> list[str]:
    return [path.name for path in latest_first(folder) if problem_of(path) is None]


def count_operations(folder: Path, world: World) -> int:
    with pytest.MonkeyPatch.context() as patch:
        done = break_at(patch, 0, OSError)
        CheckpointManager(folder, 2, "continue", world).save("checkpoint-3", fill, FILES)
        return len(done)


@pytest.mark.parametrize("what", [Killed, OSError])
def test_a_death_or_a_full_disk_at_any_operation_of_a_save_leaves_whole_ones_only(tmp_path, world, what):
    (tmp_path / "probe").mkdir()
    for step in (1, 2):
        sealed(tmp_path / "probe" / f"checkpoint-{step}")
    operations = count_operations(tmp_path / "probe", world)
    assert operations > 12, "too few to be all"
    seen = set()
    for k in range(1, operations + 1):
        folder = tmp_path / f"{k}"
        folder.mkdir()
        for step in (1, 2):
            sealed(folder / f"checkpoint-{step}")
        kept = CheckpointManager(folder, 2, "continue", world)
        written = False
        with pytest.MonkeyPatch.context() as patch:
            break_at(patch, k, what)
            with suppress(Killed):
                written = kept.save("checkpoint-3", fill, FILES)
        left = whole_ones(folder)
        seen.add(tuple(left))
        assert left[:1] in (["checkpoint-2"], ["checkpoint-3"])
        assert "checkpoint-2" in left, "the last good one was taken away"
        assert latest_valid_checkpoint(folder, silent) == folder / left[0]
        assert not written or left[0] == "checkpoint-3"
        if what is OSError and not written:
            assert [path.name for path in latest_first(folder)] == left, "half a checkpoint was left lying about"
        assert kept.save("checkpoint-4", fill, FILES), "the next one could not be written"
        assert whole_ones(folder)[0] == "checkpoint-4"
    assert {left[0] for left in seen} == {"checkpoint-2", "checkpoint-3"}


# ---- rotation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_the_newest_are_kept(tmp_path, world, limit):
    kept = CheckpointManager(tmp_path / "checkpoints", limit, "continue", world)
    for step in range(1, 6):
        assert kept.save(f"checkpoint-{step * 5}", fill, FILES)
        assert kept.latest_valid == kept.folder / f"checkpoint-{step * 5}"
        assert len(whole_ones(kept.folder)) == min(step, limit)
    assert whole_ones(kept.folder) == [f"checkpoint-{step * 5}" for step in range(5, 5 - limit, -1)]


def test_a_new_one_that_is_not_whole_never_costs_the_last_good_one(tmp_path, world, monkeypatch):
    kept = CheckpointManager(tmp_path / "checkpoints", 1, "continue", world)
    assert kept.save("checkpoint-1", fill, FILES)
    original = manager._write

    def damaging(path: Path, content: bytes) -> None:
        original(path, content)
        if path.name == COMPLETION_MARKER:  # a disk that tells of no error
            (path.parent / "model.safetensors").write_bytes(b"something else")

    monkeypatch.setattr(manager, "_write", damaging)
    assert not kept.save("checkpoint-2", fill, FILES)
    assert whole_ones(kept.folder) == ["checkpoint-1"]
    assert kept.latest_valid == kept.folder / "checkpoint-1"


def test_a_failure_is_one_line_and_stops_the_run_where_it_is_to(tmp_path, world, capsys):
    def full(folder: Path) -> None:
        (folder / "half").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    kept = CheckpointManager(tmp_path / "checkpoints", 2, "continue", world)
    assert kept.save("checkpoint-1", fill, FILES)
    assert not kept.save("checkpoint-2", full, FILES)
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 1
    for part in ("checkpoint-2 could not be written", "No space left on device", "checkpoint-1", "training continues"):
        assert part in told[0]
    kept.on_failure = "stop"
    with pytest.raises(RunError, match=r"No space left on device.*last good checkpoint is .*checkpoint-1"):
        kept.save("checkpoint-2", full, FILES)
    assert [path.name for path in kept.folder.rglob("half")] == []


@pytest.mark.parametrize("missing", FILES)
def test_a_checkpoint_that_lacks_a_needed_file_is_not_marked_complete(tmp_path, world, capsys, missing):
    def fill_but_one(folder: Path) -> None:
        fill(folder)
        (folder / missing).unlink()

    kept = CheckpointManager(tmp_path / "checkpoints", 2, "continue", world)
    assert not kept.save("checkpoint-1", fill_but_one, FILES)
    assert latest_valid_checkpoint(kept.folder, silent) is None
    assert f"{missing} was not written" in capsys.readouterr().out
    assert kept.save("checkpoint-1", fill, FILES)


def test_a_run_s_folder_that_is_gone_is_not_made_anew(tmp_path, world):
    run = tmp_path / "run"
    run.mkdir()
    kept = CheckpointManager(run / "checkpoints", 2, "continue", world)
    assert kept.save("checkpoint-1", fill, FILES)
    shutil.rmtree(run)
    assert not kept.save("checkpoint-2", fill, FILES)
    assert not run.exists()


def test_a_checkpoint_loses_its_mark_before_anything_else(tmp_path, monkeypatch):
    folder = sealed(tmp_path / "checkpoint-1")
    monkeypatch.setattr(shutil, "rmtree", lambda *arguments, **keywords: None)  # killed in the middle
    remove(folder)
    assert problem_of(folder) == f"{COMPLETION_MARKER} is missing"
