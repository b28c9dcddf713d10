"""A folder is a valid checkpoint or none, whatever happens to the disk or the process while it is written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest

from app.checkpoint import manager
from app.checkpoint.manager import CheckpointManager, latest_first, problem_of
from app.common.errors import RunError
from app.distributed.world import World

FILES = {"state-0-of-1.safetensors": b"weights", "schedule.json": b"{}"}
STATE = {"step": 1}


def write(folder: Path) -> list[str]:
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return [*FILES]


def new(folder: Path, world: World, *steps: int, limit: int = 2) -> CheckpointManager:
    folder.mkdir(exist_ok=True)
    checkpoints = CheckpointManager(folder, limit, "continue", world=world)
    for step in steps:
        assert checkpoints.save(f"checkpoint-{step}", write, STATE)
    return checkpoints


def valid_ones(folder: Path) -> list[str]:
    return [path.name for path in latest_first(folder) if problem_of(path) is None]


@pytest.mark.parametrize("name", [*FILES, "run_state.json"])
def test_a_file_that_is_missing_cut_off_or_changed_is_noticed(tmp_path, world, name):
    new(tmp_path, world, 10)
    path = tmp_path / "checkpoint-10" / name
    content = path.read_bytes()
    for damaged in (b"", content[:-1] if name in FILES else content[:-3], bytes([content[0] ^ 1]) + content[1:], b"[]"):
        path.write_bytes(damaged)
        assert problem_of(path.parent) is not None
    path.write_bytes(content)
    assert problem_of(path.parent) is None
    path.unlink()
    assert problem_of(path.parent) == f"{name} is missing"


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_the_latest_checkpoints_are_kept_and_other_folders_do_not_count(tmp_path, world, limit):
    others = ("checkpoint-final", "best-11")
    for name in (*others, ".checkpoint-12.tmp", ".checkpoint-7.old"):  # what killed runs have left
        (tmp_path / name).mkdir()
    new(tmp_path, world, 8, 9, 10, 11, 11, limit=limit)  # the last one replaces one of the same step
    kept = ["checkpoint-11", "checkpoint-10", "checkpoint-9"][:limit]
    assert valid_ones(tmp_path) == kept
    assert {path.name for path in tmp_path.iterdir()} == {*kept, *others}


def test_a_damaged_checkpoint_of_a_later_step_is_replaced_and_not_counted(tmp_path, world):
    """A run that continues from step 5 repeats step 20."""
    checkpoints = new(tmp_path, world, 5, 20)
    (tmp_path / "checkpoint-20" / "schedule.json").write_text("[")
    assert checkpoints.save("checkpoint-10", write, STATE)
    assert valid_ones(tmp_path) == ["checkpoint-10", "checkpoint-5"]
    assert checkpoints.save("checkpoint-20", write, STATE)
    assert valid_ones(tmp_path) == ["checkpoint-20", "checkpoint-10"]


class Killed(BaseException):
    """Caught by no `except` of the application, like SIGKILL."""


@contextmanager
def broken_at(k: int, what: type[BaseException]) -> Iterator[list[str]]:
    """Let the k-th file system operation in the block raise; if it raises `Killed`, so do all later operations."""
    done: list[str] = []

    def broken(original):
        def operation(*arguments, **keywords):
            done.append(original.__name__)
            if len(done) == k or (len(done) > k and what is Killed):
                raise what(28, "No space left on device")
            return original(*arguments, **keywords)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir", "open"):
            patch.setattr(os, name, broken(getattr(os, name)))
        yield done


@pytest.mark.parametrize("what", [Killed, OSError])
def test_a_kill_or_a_full_disk_at_any_operation_of_a_save_leaves_only_valid_checkpoints(tmp_path, world, what):
    latest = set()
    for k in count(1):
        folder = tmp_path / f"{k}"
        checkpoints, written = new(folder, world, 1, 2), False
        with broken_at(k, what) as done, suppress(Killed):
            written = checkpoints.save("checkpoint-3", write, STATE)
        left = valid_ones(folder)
        latest.add(left[0])
        assert [path.name for path in latest_first(folder)] == left, "an incomplete checkpoint was left"
        assert "checkpoint-2" in left, "the latest valid checkpoint was removed"
        assert not written or left[0] == "checkpoint-3"
        assert checkpoints.save("checkpoint-4", write, STATE), "the next checkpoint could not be written"
        assert valid_ones(folder)[0] == "checkpoint-4"
        if len(done) < k:  # no operation was left to break
            break
    assert k > 12, "too few to be all"
    assert latest == {"checkpoint-2", "checkpoint-3"}


def test_a_failure_stops_the_run_if_requested(tmp_path, world):
    """tests/record/test_run_record.py continues."""
    checkpoints = new(tmp_path, world, 1)
    checkpoints.on_failure = "stop"
    with broken_at(3, OSError), pytest.raises(RunError, match=r"No space left on device.*valid checkpoint is .*-1"):
        checkpoints.save("checkpoint-2", write, STATE)
    assert [*tmp_path.iterdir()] == [tmp_path / "checkpoint-1"], "nothing half-written is left"


def test_a_checkpoint_that_lacks_a_file_of_another_node_is_not_named(tmp_path, world, capsys, monkeypatch):
    monkeypatch.setattr(manager, "all_gather_object", lambda mine, world: [mine, {"state-1-of-2.safetensors": "0"}])
    assert not new(tmp_path, world).save("checkpoint-1", write, STATE)
    assert "state-1-of-2.safetensors was not written: do all nodes share the folder?" in capsys.readouterr().out
    assert latest_first(tmp_path) == []
