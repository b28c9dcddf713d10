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


def format_size(size: float) -> str:
    """Return a number of bytes with three digits and a binary unit, such as 64 KiB."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 2**10:
            return f"{three_digits(size):g} {unit}"
        size /= 2**10
    return f"{three_digits(size):g} GiB"


def three_digits(value: float) -> float:
    """Return a number rounded to three digits."""
    return float(f"{value:.3g}")


def gigabytes(value: float) -> str:
    """Return bytes or bytes per second in 1e9."""
    return f"{value / 1e9:.3g}"


def format_bandwidth(beta: float) -> str:
    """Return the bandwidth, from the seconds per byte, such as 1.25 GB/s; `–` if bytes take no time."""
    return f"{gigabytes(1 / beta)} GB/s" if beta else "–"
