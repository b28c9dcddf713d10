"""The exceptions that end a program with one line, and what makes that line safe to print."""

from __future__ import annotations

import io
import sys
import unicodedata


def escape_control_characters(text: str) -> str:
    """Return text for one line of a terminal: control characters, line ends and the like as escapes such as `\\x1b`.

    File names, columns and classes are untrusted: a control sequence in them could rewrite what the terminal shows.
    """
    if text.isprintable():
        return text
    # isprintable() also rejects spaces such as the ideographic one, which are harmless.
    return "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else repr(c)[1:-1] for c in text)


def escape_unencodable_output() -> None:
    """Make `print` write an escape for a character that the output's encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def shorten(text: str, longest: int = 60) -> str:
    """What a user wrote, as part of one line that can still be read."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


class OneLineError(Exception):
    """An exception whose message is one line without control characters, whatever it was made from."""

    def __str__(self) -> str:
        return escape_control_characters(super().__str__())


class UserError(OneLineError, ValueError):
    """A mistake of the user's: its message is one line that names the file, row or flag and what would be right.

    Entry points print it without a traceback and exit with status 2.
    """


class RunError(OneLineError, RuntimeError):
    """A failure of the run that every rank knows of: its message is one line that names step and cause. Exit status
    1."""


class Preempted(OneLineError):
    """The run was asked to stop, has saved a checkpoint on every rank's behalf and can be resumed. Exit status 75."""


class AlreadyFinished(OneLineError):
    """A restarted job finds that its run is complete: nothing is left to do. Exit status 0."""


class AgreedError(UserError):
    """A user's mistake that every rank knows of and raises at the same place, so that all can leave in good order."""
