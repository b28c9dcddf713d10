"""Read the run_state.json of a checkpoint, which another version of this program may have written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..common.errors import UserError, shorten
from ..runs.parse import parse_object
from ..runs.schema import (
    BEST,
    INTEGER,
    RUN_STATE,
    RUN_STATE_FORMAT,
    RUN_STATE_VERSION,
    TOTALS,
    JsonFormat,
    checkpoint_files,
)
from ..runs.setting_effects import FORMER
from ..setting_groups import MAX_THREADS
from ..settings import Settings
from .manager import PREFIX

VERSION_ONLY = JsonFormat(RUN_STATE, required={}, optional={"format_version": INTEGER})


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
    if (parse_object(text, str(path), VERSION_ONLY).get("format_version") or 0) > RUN_STATE_VERSION:
        raise _newer(path, f"its format_version is above {RUN_STATE_VERSION}")
    state = parse_object(text, str(path), RUN_STATE_FORMAT)
    if not (0 < state["step"] <= state["total_steps"] and state["world_size"] > 0):
        raise UserError(f"{path}: damaged: step {state['step']} of {state['total_steps']}, {state['world_size']} ranks")
    # Names decide which checkpoint is the latest, and which ones are of steps that are repeated and so are removed.
    if checkpoint.name != (name := f"{PREFIX}{state['step']}"):
        raise UserError(f"{checkpoint}: holds step {state['step']}, so it was renamed or copied: name it {name}")
    missing = [name for name in checkpoint_files(state["world_size"]) if not (checkpoint / name).is_file()]
    if missing:
        raise UserError(
            f"{checkpoint}: has no {missing[0]}: an earlier version of this program wrote it; resume it with that "
            "version, or start again in another --output_dir"
        )
    for part in (TOTALS, BEST):
        state[part.name] = _check_part(path, state.get(part.name) or {}, part)
    check_recorded_settings(path, state["settings"] | {"threads": state.get("threads") or 0})
    return state


def check_recorded_settings(path: Path, recorded: Mapping[str, Any]) -> None:
    """Check the types of recorded settings, and that this version knows all of them.

    Args:
        path: the file that they are from.

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
