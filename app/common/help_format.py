"""The layout of every program's help."""

from __future__ import annotations

import argparse
import shutil
from typing import Any, ClassVar


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Print the description unchanged, then each flag once, with its default if it has one."""

    PLACEHOLDERS: ClassVar[dict[Any, str]] = {int: "N", float: "X"}

    def __init__(self, prog: str) -> None:
        # get_terminal_size ignores a COLUMNS variable that is not a positive number; argparse's default does not.
        super().__init__(prog, max_help_position=36, width=min(120, shutil.get_terminal_size((100, 24)).columns))

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or "default: " in (action.help or ""):
            return action.help
        return super()._get_help_string(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Format as `--flag VALUE`, without the alternative spelling with hyphens."""
        if not action.option_strings:
            return super()._format_action_invocation(action)
        if action.nargs in (0, "?"):  # a switch
            return action.option_strings[0]
        choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else None
        value = choices or action.metavar or self.PLACEHOLDERS.get(action.type, "TEXT")
        return f"{action.option_strings[0]} {value}"
