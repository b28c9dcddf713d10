"""How a setting is declared: a dataclass field with its `--help` text and its valid values."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from ..common.valid import Rule


def setting(default: Any, help: str, valid: Rule | None = None) -> Any:
    """Create a dataclass field.

    Args:
        help: the `--help` text, in which argparse would interpret a bare %.
        valid: the rule for every value but None.
    """
    return field(default=default, metadata={"help": help.replace("%", "%%"), "valid": valid})
