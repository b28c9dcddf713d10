"""Write, verify and rotate checkpoints.

A process can be killed between any two lines of this file. A checkpoint is therefore written to a staging directory,
flushed to disk, renamed once, and only then marked complete. Without the completion marker a folder is not a
checkpoint. With it, the sizes and hashes in the manifest show whether a file has changed since it was written.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from ..common.files import flush
from ..common.files import remove as remove_path
from ..distributed.collectives import WRITE_ERRORS, stop_or_warn, write_on_ranks
from ..distributed.world import World

PREFIX = "checkpoint-"
STAGING = ".writing"
MANIFEST = "manifest.json"
COMPLETION_MARKER = "COMPLETE"
MARKER_SIZE = hashlib.sha256().digest_size * 2  # bytes of the completion marker, the hash of the manifest


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix(PREFIX))


def problem_of(folder: Path) -> str | None:
    """Return the first problem of a checkpoint: it is incomplete, or a file's size or hash has changed; or None."""
    try:
        manifest = (folder / MANIFEST).read_bytes()
        marker = (folder / COMPLETION_MARKER).read_bytes()
        if len(marker) != MARKER_SIZE:
            return f"{COMPLETION_MARKER} has {len(marker)} bytes, not {MARKER_SIZE}"
        if marker != hashlib.sha256(manifest).hexdigest().encode():
            return f"{MANIFEST} or {COMPLETION_MARKER} has changed since it was written"
        for name, (size, sha256) in json.loads(manifest).items():
            path = folder / name
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes, not {size}"
            if sha256_of(path) != sha256:
                return f"{name} has changed since it was written"
    except FileNotFoundError as missing:
        return f"{Path(missing.filename).name} is missing"
    except (OSError, ValueError) as unreadable:
        return f"cannot be read: {unreadable}"
    return None


def was_complete(folder: Path) -> bool:
    """Tell whether a checkpoint was marked complete. A run that is killed meanwhile leaves a shorter marker."""
    try:
        return (folder / COMPLETION_MARKER).stat().st_size == MARKER_SIZE
    except FileNotFoundError:
        return False


def latest_valid_checkpoint(folder: Path, report: Callable[[str], None]) -> Path | None:
    """Return the latest valid checkpoint in a folder, or None. Report the problem of each later one."""
    for checkpoint in latest_first(folder):
        problem = problem_of(checkpoint)
        if problem is None:
            return checkpoint
        report(f"{checkpoint} is skipped: {problem}")
    return None


def latest_first(folder: Path) -> list[Path]:
    """Return the folders that are named like a checkpoint, complete or not, the latest step first."""
    folders = [p for p in folder.glob(f"{PREFIX}*") if p.is_dir() and p.name.removeprefix(PREFIX).isdecimal()]
    return sorted(folders, key=step_of, reverse=True)


def commit_checkpoint(staging: Path, folder: Path) -> None:
    """Turn the files in a staging directory into a checkpoint."""
    manifest = {}
    for path in sorted(path for path in staging.rglob("*") if path.is_file()):
        flush(path)
        manifest[path.relative_to(staging).as_posix()] = (path.stat().st_size, sha256_of(path))
    content = json.dumps(manifest, indent=1, sort_keys=True).encode()
    _write(staging / MANIFEST, content)
    for directory in (staging, *(path for path in staging.rglob("*") if path.is_dir())):
        flush(directory)
    remove(folder)  # a damaged checkpoint of the same step, or one from before a resume
    os.rename(staging, folder)
    staging.parent.rmdir()
    flush(folder.parent)
    _write(folder / COMPLETION_MARKER, hashlib.sha256(content).hexdigest().encode())
    flush(folder)


def remove(folder: Path) -> None:
    """Remove a checkpoint. Its marker goes first: if this is interrupted, the rest is not a checkpoint.

    Of a link, remove only the link: the checkpoint that it links to belongs to another folder, such as an archive.
    """
    if not folder.is_symlink():
        with suppress(FileNotFoundError):
            (folder / COMPLETION_MARKER).unlink()
    remove_path(folder)


class CheckpointManager:
    """The checkpoints of one run. `save` is collective; rank 0 creates, commits and removes folders."""

    def __init__(self, folder: Path, limit: int, on_failure: str, *, world: World) -> None:
        self.folder, self.world = folder, world
        self.limit = limit  # how many checkpoints to keep
        self.on_failure = on_failure  # whether to `continue` or `stop` the run if a checkpoint cannot be written
        self.latest_valid: Path | None = None

    def find_latest_valid(self) -> Path | None:
        """Return the latest valid checkpoint, for a message about a failure. Not collective.

        Rank 0 may have marked one complete right before it failed, so that `latest_valid` does not know of it.
        """
        known = None
        with suppress(OSError):  # it must not replace the failure that is reported
            known = self.latest_valid if self.latest_valid is not None and self.latest_valid.is_dir() else None
            later = (p for p in latest_first(self.folder) if known is None or step_of(p) > step_of(known))
            return next((checkpoint for checkpoint in later if problem_of(checkpoint) is None), known)
        return known

    def save(self, name: str, write: Callable[[Path], None], required: Collection[str]) -> bool:
        """Write a folder and mark it complete. Collective.

        Args:
            write: `write(staging)`, called on every rank, writes the files.
            required: the files without which the folder must not be marked complete.

        Returns:
            Whether it was written. If not, nothing of it is left, and earlier checkpoints are untouched.

        Raises:
            RunError: it could not be written, and `on_failure` is `stop`.
        """
        staging, folder = self.folder / STAGING / name, self.folder / name

        def clean_up() -> None:
            if self.world.local_rank == 0:
                shutil.rmtree(staging.parent, ignore_errors=True)

        latest = f"; the latest valid checkpoint is {self.latest_valid or 'none'}"
        with stop_or_warn(
            folder, on_failure=self.on_failure, warn=self.world.print_main, clean_up=clean_up, note=latest
        ):
            write_on_ranks(lambda: self._create(staging), self.folder, self.world, main_only=True)
            write_on_ranks(lambda: write(staging), self.folder, self.world)
            write_on_ranks(lambda: self._commit(staging, folder, required), self.folder, self.world, main_only=True)
            if name.startswith(PREFIX):
                self.latest_valid = folder
            return True
        return False

    def _create(self, staging: Path) -> None:
        shutil.rmtree(staging.parent, ignore_errors=True)  # left by a run that was killed while it was writing
        for folder in (self.folder, staging.parent):  # not their parents: don't recreate a run folder that was removed
            folder.mkdir(exist_ok=True)
        staging.mkdir()

    def _commit(self, staging: Path, folder: Path, required: Collection[str]) -> None:
        missing = [name for name in required if not (staging / name).is_file()]
        if missing:
            raise OSError(f"{', '.join(missing)} was not written")
        try:
            commit_checkpoint(staging, folder)
            if (problem := problem_of(folder)) is not None:
                raise OSError(problem)
        except WRITE_ERRORS:
            if problem_of(folder) is not None:
                remove(folder)
            raise
        for old in latest_first(self.folder)[self.limit :]:  # only now that a later one is known to be valid
            remove(old)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
    flush(path)
