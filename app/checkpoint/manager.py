"""Write, verify and rotate checkpoints: staged, flushed, renamed once, marked complete last, verified before reading.

A process can be killed between any two lines of this file. Until the mark is there a folder is no checkpoint; once it
is, the manifest's sizes and hashes say whether every byte is still what was written. So `newest` is never half of
anything.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError

from app.distributed.collectives import first_failure
from app.distributed.world import World
from app.errors import RunError, escape_control_characters
from app.files import flush

PREFIX = "checkpoint-"
STAGING = ".writing"
MANIFEST = "manifest.json"
COMPLETION_MARKER = "COMPLETE"
WRITE_ERRORS = (OSError, SafetensorError, RuntimeError)  # torch.save tells of a full disk by a RuntimeError


def step_of(folder: Path) -> int:
    """The optimizer step after which a checkpoint was written."""
    return int(folder.name.removeprefix(PREFIX))


def problem_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None: it is complete and every file has the size and hash it was written
    with."""
    try:
        manifest = (folder / MANIFEST).read_bytes()
        if (folder / COMPLETION_MARKER).read_text(encoding="ascii") != hashlib.sha256(manifest).hexdigest():
            return f"{MANIFEST} is not the one that was written"
        for name, (size, sha256) in json.loads(manifest).items():
            path = folder / name
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes, not {size}"
            if _sha256(path) != sha256:
                return f"{name} is not what was written"
    except FileNotFoundError as missing:
        return f"{Path(missing.filename).name} is missing"
    except (OSError, ValueError) as unreadable:
        return f"can't be read: {unreadable}"
    return None


def was_complete(folder: Path) -> bool:
    """Whether a checkpoint was once marked complete. A run killed while it writes the mark leaves a shorter one."""
    try:
        return (folder / COMPLETION_MARKER).stat().st_size == hashlib.sha256().digest_size * 2
    except FileNotFoundError:
        return False


def latest_valid_checkpoint(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint in `folder` that is whole; says of each newer one what is wrong with it."""
    for checkpoint in latest_first(folder):
        problem = problem_of(checkpoint)
        if problem is None:
            return checkpoint
        say(f"{checkpoint} is passed over: {problem}")
    return None


def latest_first(folder: Path) -> list[Path]:
    """The folders that have a checkpoint's name, whole or not."""
    found = [p for p in folder.glob(f"{PREFIX}*") if p.is_dir() and p.name.removeprefix(PREFIX).isdecimal()]
    return sorted(found, key=step_of, reverse=True)


def commit_checkpoint(aside: Path, folder: Path) -> None:
    """Makes a checkpoint of the files in `aside`, under the name `folder`."""
    manifest = {}
    for path in _files(aside):
        flush(path)
        manifest[path.relative_to(aside).as_posix()] = (path.stat().st_size, _sha256(path))
    content = json.dumps(manifest, indent=1, sort_keys=True).encode()
    _write(aside / MANIFEST, content)
    for directory in {path.parent for path in _files(aside)}:
        flush(directory)
    remove(folder)  # one of the same step from before a resume, or a damaged one
    os.rename(aside, folder)
    aside.parent.rmdir()
    flush(folder.parent)
    _write(folder / COMPLETION_MARKER, hashlib.sha256(content).hexdigest().encode())
    flush(folder)


def remove(folder: Path) -> None:
    """Removes a checkpoint, its mark first: killed in the middle, what is left is no checkpoint."""
    with suppress(FileNotFoundError):
        (folder / COMPLETION_MARKER).unlink()
    shutil.rmtree(folder, ignore_errors=True)


class CheckpointManager:
    """The checkpoints of one run. Every rank calls `save`, which is collective; rank 0 does what is done once."""

    def __init__(self, folder: Path, limit: int, on_failure: str, world: World) -> None:
        """
        Args:
            limit: how many to keep.
            on_failure: `continue` or `stop` the run where one can't be written.
        """
        self.folder, self.limit, self.on_failure, self.world = folder, limit, on_failure, world
        self.latest_valid: Path | None = None

    def save(self, name: str, fill: Callable[[Path], None], needed: Collection[str]) -> bool:
        """Write a folder and mark it complete.

        Args:
            fill: `fill(staging)`, called on every rank, writes the files.
            needed: the files without which it must not be marked complete.

        Returns:
            Whether it was written. Where it wasn't, nothing of it is left, and what was there before still is.

        Raises:
            RunError: it wasn't, and `on_failure` is `stop`.
        """
        aside, folder = self.folder / STAGING / name, self.folder / name
        problem = (
            self._attempt(lambda: self._make(aside), main_only=True)
            or self._attempt(lambda: fill(aside))
            or self._attempt(lambda: self._commit(aside, folder, needed), main_only=True)
        )
        if problem is None:
            if name.startswith(PREFIX):
                self.latest_valid = folder
            return True
        if self.world.local_rank == 0:
            shutil.rmtree(aside.parent, ignore_errors=True)
        text = f"{folder} could not be written: {problem}; the last good checkpoint is {self.latest_valid or 'none'}"
        if self.on_failure == "stop":
            raise RunError(text)
        line = escape_control_characters(text)
        self.world.print_main(f"warning: {line}; training continues (--on_save_failure continue)")
        return False

    def _attempt(self, work: Callable[[], None], main_only: bool = False) -> str | None:
        """Does the work and returns, on every rank, the first rank's trouble with it."""
        problem = None
        if self.world.is_main_process or not main_only:
            try:
                work()
            except WRITE_ERRORS as error:
                problem = " ".join(str(error).split()) or type(error).__name__
                if not isinstance(error, OSError):  # words of the library's own: what the disk says helps more
                    problem += f" ({shutil.disk_usage(self.folder).free >> 20} MiB are free there)"
        return first_failure(problem, self.world)

    def _make(self, aside: Path) -> None:
        shutil.rmtree(aside.parent, ignore_errors=True)  # of a run that was killed while it wrote
        for folder in (self.folder, aside.parent):  # not their parents: a run's folder that is gone is gone
            folder.mkdir(exist_ok=True)
        aside.mkdir()

    def _commit(self, aside: Path, folder: Path, needed: Collection[str]) -> None:
        missing = [name for name in needed if not (aside / name).is_file()]
        if missing:
            raise OSError(f"{', '.join(missing)} was not written")
        try:
            commit_checkpoint(aside, folder)
            problem = problem_of(folder)
            if problem is not None:
                raise OSError(problem)
        except WRITE_ERRORS:
            if problem_of(folder) is not None:
                remove(folder)
            raise
        for old in latest_first(self.folder)[self.limit :]:  # only now that a newer one is known to be good
            remove(old)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
