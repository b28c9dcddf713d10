"""Hints for flags of other training scripts and of launchers that this project does not have."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path

import yaml

from .paths import with_package_name


def hints() -> dict[str, str]:
    """Return the hint of each flag in `flag_hints.yaml`."""
    by_flags = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {flag: with_package_name(hint) for flags, hint in by_flags.items() for flag in flags.split()}


def hint_for(argument: str, flags: Collection[str]) -> str | None:
    """Suggest a flag to use instead of an unknown argument.

    Args:
        argument: As on the command line, such as `--lr=1e-3`.
        flags: The names of the program's flags, without leading dashes and with underscores.

    Returns:
        A short hint, or None if nothing is known about the argument and no existing flag resembles it.
    """
    if not argument.startswith("-"):
        return None
    name = argument.partition("=")[0].lstrip("-").replace("-", "_")
    if (hint := hints().get(name)) is not None:
        return hint
    similar = difflib.get_close_matches(name, flags, n=1, cutoff=0.75)
    return f"did you mean --{similar[0]}?" if similar else None
