"""Sizes in bytes: read them from flags and print them."""

from __future__ import annotations

import re

from app.errors import UserError, shorten

MIB = 2**20
UNITS = {"KiB": 2**10, "MiB": MIB, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_size(flag: str, text: str) -> int:
    """Convert a size such as `24GiB` or `1.5 TB` to bytes.

    Args:
        flag: its name, for the error message.

    Raises:
        UserError: it is not a number with a unit.
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([KMGT]i?B)", text.strip())
    if match is None or not float(match[1]):
        raise UserError(f"--{flag} {shorten(text)}: must be a number with a unit, such as 24GiB or 80GB")
    return int(float(match[1]) * UNITS[match[2]])


def mib(size: float) -> str:
    """Return a number of bytes in MiB."""
    return f"{size / MIB:,.1f}"
