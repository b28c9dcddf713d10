"""Find the run folder and the checkpoint to resume from, and read what they record, which may be damaged.

The first of these rules that applies decides:

1. torchrun has restarted this job: continue in the folder that its earlier processes wrote to.
2. No `--resume_from_checkpoint`: start a new run.
3. `--resume_from_checkpoint auto`: continue the run in `--output_dir`, or else the path's latest run unless it has
   finished. Without one, start a new run.
4. `--resume_from_checkpoint PATH`, a checkpoint or a run folder, whose latest valid checkpoint is used: continue that
   run in its own folder, or with `--output_dir` start a new run from the checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..common.errors import UserError, shorten
from ..runs.folder import lock
from ..runs.parse import parse_object
from ..runs.schema import (
    BEST,
    CHECKPOINTS,
    INTEGER,
    LATEST,
    METRICS,
    RUN_STATE,
    RUN_STATE_FORMAT,
    RUN_STATE_VERSION,
    RUNS,
    SETTINGS,
    TEXT,
    TEXTS,
    TOTALS,
    JsonFormat,
)
from ..runs.setting_effects import FORMER
from ..setting_groups import MAX_THREADS
from ..settings import Settings
from .manager import PREFIX, latest_first, latest_valid_checkpoint, problem_of, was_complete

# The keys that tell a run's settings.json from another program's. `check_recorded_settings` checks the other values.
OF_A_RUN = JsonFormat(
    SETTINGS.name,
    required={"path": TEXT, "world_size": INTEGER, "csv": TEXT, "train_batch_size": INTEGER},
    optional={"launchers": TEXTS},
)
VERSION_ONLY = JsonFormat(RUN_STATE, required={}, optional={"format_version": INTEGER})
NO_CHECKPOINT = "{run} has no complete checkpoint, so training starts from the beginning"
NOT_IN_A_RUN = "is not inside a run folder; copy the whole run folder, because its logs are needed to resume"


@dataclass(frozen=True)
class ResumePoint:
    """The result of `find_checkpoint`. With nothing set, a new run starts from the beginning."""

    folder: Path | None = None  # the run's own folder, if it exists already; it is locked
    checkpoint: Path | None = None  # the one to resume from, in `folder` or in another run's folder
    lock: int | None = None  # the descriptor that keeps other jobs out of `folder`
    finished: bool = False  # whether `folder` holds this job's finished run


def folder_of_this_job(path_name: str, settings: Settings, launchers: Collection[str]) -> Path | None:
    """Return the run folder that earlier processes of this job wrote to; None if there is none. Call it on rank 0.

    A folder belongs to this job only if one of the torchrun processes recorded in its settings.json still takes part.
    Otherwise it belongs to another run, or to another program that happens to have a settings.json.
    """
    output_dir, requested = settings.output_dir, settings.resume_from_checkpoint
    if output_dir is not None:
        candidates = [Path(output_dir)]
    elif requested not in (None, "auto"):  # the run is resumed in its own folder, wherever that is
        run, _ = _locate(str(requested))
        candidates = [run] if run is not None else []
    else:
        candidates = sorted((RUNS / path_name).glob("*"), reverse=True)
    for folder in candidates:
        if set(launchers) & set(read_settings(folder).get("launchers") or []):
            return folder.resolve()
    return None


def find_checkpoint(
    path_name: str, settings: Settings, *, own: Path | None, warn: Callable[[str], None]
) -> ResumePoint:
    """Choose the folder and the checkpoint to resume from, by the rules at the top of this file. Call it on rank 0.

    Args:
        own: the result of `folder_of_this_job`.
        warn: prints a line about each damaged checkpoint that is skipped.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or another job is writing to its folder.
    """
    requested = settings.resume_from_checkpoint
    if own is not None:
        return _find_own(own, requested, warn)
    if requested is None:
        return ResumePoint()
    if requested == "auto":
        return _find_latest(path_name, settings.output_dir, warn)
    run, _ = _locate(requested)
    if (writer := read_settings(run or Path(requested)).get("path", path_name)) != path_name:
        raise UserError(f"--resume_from_checkpoint {requested}: only {writer}, which wrote it, can resume it")
    if settings.output_dir is not None:
        return ResumePoint(None, _requested_checkpoint(requested, warn))
    lock_fd = lock(run) if run is not None else None  # without a run, the next line raises
    return ResumePoint(run, _requested_checkpoint(requested, warn), lock_fd)


def _find_own(own: Path, requested: str | None, warn: Callable[[str], None]) -> ResumePoint:
    """Apply rule 1. Until the job has saved a checkpoint, it starts again from the requested one."""
    lock_fd = lock(own)
    if (own / METRICS.name).is_file():
        return ResumePoint(own, None, lock_fd, finished=True)
    checkpoint = _latest_checkpoint(own, warn)
    if checkpoint is None and requested not in (None, "auto"):
        checkpoint = _requested_checkpoint(str(requested), warn)
    if checkpoint is None:
        warn(NO_CHECKPOINT.format(run=own))
    return ResumePoint(own, checkpoint, lock_fd)


def _find_latest(path_name: str, output_dir: str | None, warn: Callable[[str], None]) -> ResumePoint:
    """Apply rule 3."""
    latest = RUNS / path_name / LATEST
    if output_dir is None:
        _reject_dangling(latest, ": name the run to resume, or start a new one without --resume_from_checkpoint")
    folder = Path(output_dir) if output_dir else latest.resolve()
    recorded = read_settings(folder)
    if not recorded:
        if latest_first(folder / CHECKPOINTS):
            raise UserError(f"{folder}: has checkpoints, but its {SETTINGS.name} is missing or cannot be read")
        warn("--resume_from_checkpoint auto: there is no run to resume, so training starts from the beginning")
        return ResumePoint()  # `reject_used` rejects a folder that holds anything else
    if recorded["path"] != path_name:
        raise UserError(f"--output_dir {folder}: holds a run of {recorded['path']}: name another folder")
    lock_fd = lock(folder)
    finished = (folder / METRICS.name).is_file()
    if finished and output_dir is None:
        os.close(lock_fd)
        return ResumePoint()
    checkpoint = _latest_checkpoint(folder, warn)
    if checkpoint is None:
        if finished:
            raise UserError(
                f"--output_dir {folder}: holds a finished run and no checkpoint to resume from: name a new one"
            )
        warn(NO_CHECKPOINT.format(run=folder))
    return ResumePoint(folder.resolve(), checkpoint, lock_fd)


def _latest_checkpoint(run: Path, warn: Callable[[str], None]) -> Path | None:
    """Return the latest valid checkpoint of a run that continues in its own folder; None: it starts again.

    Raises:
        UserError: there are only damaged ones. To start again would remove them, although the cause may be temporary.
    """
    folder = run / CHECKPOINTS
    _reject_dangling(folder)
    checkpoint = latest_valid_checkpoint(folder, warn)
    if checkpoint is None:
        damaged = latest_first(folder)
        # A run that is killed before its first checkpoint is complete leaves that one without a marker. All others
        # were complete: the next one is written only after the marker.
        if len(damaged) > 1 or any(map(was_complete, damaged)):
            raise UserError(f"{run}: none of its checkpoints can be read: start again in another --output_dir")
    return checkpoint


def _reject_dangling(link: Path, advice: str = "") -> None:
    """Reject a link that points nowhere, for example to a disk that is not mounted: work would be repeated."""
    if link.is_symlink() and not link.exists():
        raise UserError(f"{link}: links to {os.readlink(link)}, which does not exist{advice}")


def _requested_checkpoint(requested: str, warn: Callable[[str], None]) -> Path:
    """Return the requested checkpoint, or the latest valid one of the requested run."""
    path = Path(requested)
    if not path.is_dir():
        raise UserError(f"--resume_from_checkpoint {requested}: no such folder")
    run, checkpoint = _locate(requested)
    if checkpoint is not None:
        problem = problem_of(checkpoint)
    elif run is not None:
        checkpoint = latest_valid_checkpoint(run / CHECKPOINTS, warn)
        problem = "has no complete checkpoint" if checkpoint is None else None
    elif _is_checkpoint(path):
        problem = problem_of(path) or NOT_IN_A_RUN
    elif latest_first(path):
        problem = "is a folder of checkpoints: name one of them, or the run's folder"
    else:
        problem = NOT_IN_A_RUN if latest_first(path / CHECKPOINTS) else "has no complete checkpoint"
    if problem is not None:
        raise UserError(f"--resume_from_checkpoint {requested}: {problem}")
    assert checkpoint is not None
    return checkpoint


def _locate(requested: str) -> tuple[Path | None, Path | None]:
    """Return the run folder that a path names or lies in, and the checkpoint that it names, which may be gone."""
    # A checkpoints folder may be a link to another disk, where its parent is no run folder. So look at the path as it
    # is written first, and then at its target.
    for path in (Path(os.path.abspath(requested)), Path(requested).resolve()):
        is_checkpoint = _is_checkpoint(path)
        if is_checkpoint and path.parent.name != CHECKPOINTS:
            continue
        run = (path.parent.parent if is_checkpoint else path).resolve()
        if (run / SETTINGS.name).is_file():
            return run, run / CHECKPOINTS / path.name if is_checkpoint else None
    return None, None


def _is_checkpoint(path: Path) -> bool:
    """Return whether a path is named like a checkpoint. A run folder may have such a name, but has a settings.json."""
    return path.name.startswith(PREFIX) and not (path / SETTINGS.name).is_file()


def read_settings(run: Path) -> dict[str, Any]:
    """Return the content of a run's settings.json; empty if there is none, or if it belongs to another program."""
    path = run / SETTINGS.name
    try:
        return parse_object(path.read_text(encoding="utf-8"), str(path), OF_A_RUN)
    except (OSError, UnicodeDecodeError, UserError):
        return {}


def read_run_state(checkpoint: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's run_state.json.

    Raises:
        UserError: it cannot be read, is damaged, or is from a version of this program with another format.
    """
    path = checkpoint / RUN_STATE
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"{checkpoint}: every rank must be able to read it: {problem}") from None
    format_version = parse_object(text, str(path), VERSION_ONLY).get("format_version") or 0
    if format_version > RUN_STATE_VERSION:
        raise _newer(path, f"its format_version is above {RUN_STATE_VERSION}")
    if format_version < RUN_STATE_VERSION:
        raise UserError(
            f"{checkpoint}: an earlier version of this program wrote it, which drew other dropout masks: resume it "
            "with that version, or start again in another --output_dir"
        )
    state = parse_object(text, str(path), RUN_STATE_FORMAT)
    if not (0 < state["step"] <= state["total_steps"] and state["world_size"] > 0):
        raise UserError(f"{path}: damaged: step {state['step']} of {state['total_steps']}, {state['world_size']} ranks")
    # Names decide which checkpoint is the latest, and which ones are of steps that are repeated and so are removed.
    if checkpoint.name != (name := f"{PREFIX}{state['step']}"):
        raise UserError(f"{checkpoint}: holds step {state['step']}, so it was renamed or copied: name it {name}")
    for part in (TOTALS, BEST):
        state[part.name] = _check_part(path, state.get(part.name) or {}, part)
    check_recorded_settings(path, state["settings"] | {"threads": state.get("threads") or 0})
    return state


def check_recorded_settings(path: Path, recorded: Mapping[str, Any]) -> None:
    """Check the types of settings that were read from a file, and that this version knows all of them.

    Raises:
        UserError: a setting is unknown, because a newer version wrote the file; or a value is damaged.
    """
    hints = get_type_hints(Settings)
    known = Settings().as_dict().keys()
    if unknown := sorted(recorded.keys() - known - set(FORMER)):
        raise _newer(path, f"the setting {unknown[0]} is unknown")
    for name in sorted(recorded.keys() & known):
        value, types = recorded[name], _types_of(hints[name])
        if type(value) not in types and not (type(value) is int and float in types):  # True is no int here
            raise UserError(f"{path}: damaged: the setting {name} is {shorten(repr(value))}")
    if not 0 <= recorded.get("threads", 0) <= MAX_THREADS:
        raise UserError(f"{path}: damaged: {recorded['threads']} threads")


def _types_of(hint: Any) -> set[type]:
    if get_origin(hint) is Literal:
        return {type(choice) for choice in get_args(hint)}
    parts = get_args(hint)
    return set().union(*map(_types_of, parts)) if parts else {hint}


def _check_part(path: Path, content: Mapping[str, Any], part: JsonFormat) -> dict[str, Any]:
    """Check an object inside run_state.json, and return it without null, which stands for the default."""
    if unknown := sorted(content.keys() - part.required.keys() - part.optional.keys()):
        raise _newer(path, f"{part.name}.{unknown[0]} is unknown")
    checked = parse_object(json.dumps(content), f"{path}, {part.name}", part)
    return {name: value for name, value in checked.items() if value is not None}


def _newer(path: Path, reason: str) -> UserError:
    return UserError(
        f"{path}: a newer version of this program wrote it ({reason}): resume with that version, or start again in "
        "another --output_dir"
    )
