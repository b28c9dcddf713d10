"""Write, check and rotate checkpoints.

All files of a checkpoint are written into a staging directory and flushed to disk. Only then it gets its name,
`checkpoint-<step>`, which the file system does at once. So whenever a process is killed, a folder with that name is
complete. Its run_state.json has a hash of each file, computed by the rank that wrote it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common.files import commit, flush, remove, write_json
from ..distributed.collectives import all_gather_object, stop_or_warn, write_on_ranks
from ..distributed.world import World
from ..runs.hashes import hash_files
from ..runs.schema import RUN_STATE

PREFIX = "checkpoint-"
# Increase the version if a program of the version before must not resume from run_state.json.
# Version 2: dropout masks belong to the rows of the global batch. Version 3: shards that
# torch.distributed.checkpoint reads, and hashes of all files.
RUN_STATE_VERSION = 3


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix(PREFIX))


def latest_first(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the latest step first."""
    folders = [p for p in folder.glob(f"{PREFIX}*") if p.is_dir() and p.name.removeprefix(PREFIX).isdecimal()]
    return sorted(folders, key=step_of, reverse=True)


def problem_of(folder: Path) -> str | None:
    """Return why a checkpoint cannot be used: a file is missing or has changed, or it has another format; or None."""
    try:
        state = json.loads((folder / RUN_STATE).read_bytes())
        if state.get("format_version") != RUN_STATE_VERSION:
            return "another version of this program wrote it: resume it with that version, or start again"
        for name, sha256 in state["files"].items():
            if hash_files(folder / name) != sha256:
                return f"{name} has changed since it was written"
    except FileNotFoundError as missing:
        return f"{Path(missing.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        return f"cannot be read: {problem}"
    return None


class CheckpointManager:
    """The checkpoints of one run. `save` is collective; rank 0 creates, names and removes folders."""

    def __init__(self, folder: Path, limit: int, on_failure: str, *, world: World) -> None:
        self.folder, self.world = folder, world
        self.limit = limit  # how many checkpoints to keep
        self.on_failure = on_failure  # whether to `continue` or `stop` the run if a checkpoint cannot be written
        self.latest_valid: Path | None = None

    def save(
        self, name: str, write: Callable[[Path], Sequence[str]], run_state: Mapping[str, Any] | None = None
    ) -> bool:
        """Write a folder that is complete as soon as it has its name. Collective.

        Args:
            write: `write(staging)`, called on every rank, writes files and returns their names.
            run_state: the content of run_state.json, besides its version and the hashes of all files.

        Returns:
            Whether it was written. If not, nothing of it is left, and earlier checkpoints are untouched.

        Raises:
            RunError: it could not be written, and `on_failure` is `stop`.
        """
        staging, folder = self.folder / f".{name}.tmp", self.folder / name
        hashes: dict[str, str] = {}

        def create() -> None:
            for left in self.folder.glob(".*"):  # by a run that was killed while it was writing or removing
                shutil.rmtree(left, ignore_errors=True)
            self.folder.mkdir(exist_ok=True)  # not its parents: don't recreate a run folder that was removed
            staging.mkdir()

        def write_and_hash() -> None:
            for file in write(staging):
                flush(staging / file)
                hashes[file] = hash_files(staging / file)

        def finish() -> None:
            files = {file: sha256 for part in by_rank for file, sha256 in part.items()}
            if missing := [file for file in files if not (staging / file).is_file()]:
                raise OSError(f"{', '.join(missing)} was not written: do all nodes share the folder?")
            content = {"format_version": RUN_STATE_VERSION, **(run_state or {}), "files": files}
            write_json(staging / RUN_STATE, content)
            commit(staging, folder)  # it may replace one of the same step, which is damaged
            if name.startswith(PREFIX):  # damaged ones of later steps, which are repeated, do not count
                for old in [c for c in latest_first(self.folder) if step_of(c) <= step_of(folder)][self.limit :]:
                    remove(old)

        try:
            write_on_ranks(create, self.world, main_only=True)
            write_on_ranks(write_and_hash, self.world)
            by_rank = all_gather_object(hashes, self.world)
            write_on_ranks(finish, self.world, main_only=True)
        except OSError as problem:
            shutil.rmtree(staging, ignore_errors=True)
            note = f"; the latest valid checkpoint is {self.latest_valid or 'none'}"
            stop_or_warn(folder, problem, self.on_failure, warn=self.world.print_main, note=note)
            return False
        if name.startswith(PREFIX):
            self.latest_valid = folder
        return True
