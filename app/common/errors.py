"""Exceptions that end a program with one line of output, and helpers that make untrusted text safe to print."""

from __future__ import annotations

import io
import os
import sys
import traceback
import unicodedata
from collections.abc import Sequence

HANDLERS_OF_OPERATIONS = ("__torch_function__", "__torch_dispatch__")


def escape_control_characters(text: str) -> str:
    """Replace control characters, line breaks and other unprintable characters with escapes such as `\\x1b`.

    File names, column names and class names are untrusted: control sequences in them could manipulate the terminal.
    """
    if text.isprintable():
        return text
    # isprintable() also rejects harmless spaces, such as the ideographic space.
    return "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else repr(c)[1:-1] for c in text)


def escape_unencodable_output() -> None:
    """Make `print` escape characters that the output encoding cannot represent, instead of raising.

    Without a standard output, as in a daemon, it writes nothing.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def shorten(text: object, max_length: int = 60) -> str:
    """Truncate text to `max_length` characters, the last of which is … then."""
    text = str(text)
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


def list_names(names: Sequence[str]) -> str:
    """List the first 20 column or class names, which are untrusted and may be long, for an error message."""
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(repr(shorten(name, 40)) for name in names[:20]) + more


def raised_by_model(problem: BaseException) -> bool:
    """Tell whether an exception was raised in a model's code, and not in a hook of ours that the model has called."""
    answer = False
    for frame, _ in traceback.walk_tb(problem.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module.startswith(("transformers.models.", "transformers_modules.")):
            answer = True
        # All operations of a model pass through these methods, also the one that has failed.
        elif module.startswith(f"{__name__.partition('.')[0]}.") and frame.f_code.co_name not in HANDLERS_OF_OPERATIONS:
            answer = False
    return answer


class OneLineError(Exception):
    """An exception whose message is always one line without control characters."""

    def __str__(self) -> str:
        return escape_control_characters(super().__str__())


class UserError(OneLineError, ValueError):
    """Invalid input. The message names the file, row or flag and the valid values.

    Entry points print it without a traceback and exit with status 2.
    """


class RunError(OneLineError, RuntimeError):
    """A failure that every rank raises at the same place. The message names step and cause. Exit status 1."""


class Preempted(OneLineError):
    """The run was asked to stop and has saved a checkpoint to resume from. Exit status 75."""


class AlreadyFinished(OneLineError):
    """A restarted or resumed run has already finished. Exit status 0."""


class AgreedError(UserError):
    """A `UserError` that every rank raises at the same place, so that all ranks can exit in order."""
