"""Recognize the encoding of CSV and JSON files."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

import fsspec
from charset_normalizer.constant import FREQUENCIES

# Chinese text in GB18030 is hardly ever valid UTF-8, but many texts in UTF-8 are valid GB18030.
ENCODINGS = {"csv": ("utf-8-sig", "gb18030"), "json": ("utf-8-sig",)}
FREQUENT = frozenset(FREQUENCIES["Chinese"])  # about a third of the characters of Chinese texts


def recognize_encoding(files: Collection[str], given: str | None, candidates: Sequence[str]) -> str:
    """Return the encoding in which all files are valid and, unless it is given, plausible: others are valid as well.

    The given encoding is for files that are not UTF-8. ASCII is valid UTF-8 and says nothing.
    """
    for encoding in ("utf-8-sig", given) if given else candidates:
        counts, is_ascii = Counter[str](), True
        with suppress(UnicodeError):
            for file in files:
                with fsspec.open(file, "rt", encoding=encoding, compression="infer") as stream:
                    for line in stream:
                        is_ascii = is_ascii and line.isascii()
                        # ISO-2022 and UTF-16 are valid ASCII.
                        if encoding != given and ("\x1b$" in line or "\0" in line[:2]):
                            raise UnicodeError
                        if encoding == "gb18030" != given and not line.isascii():
                            counts.update(line)
                            with suppress(UnicodeDecodeError):
                                if max(line.encode(encoding).decode()) >= "\u0800":  # hardly any line is, but in UTF-8
                                    raise UnicodeError
            if given and encoding != given and is_ascii:  # such as HZ, or UTF-16 without other characters
                continue
            letters = sum(n for c, n in counts.items() if c.isalpha() and not c.isascii())
            is_chinese = letters <= 8 * sum(counts[c] for c in FREQUENT) and len(FREQUENT & counts.keys()) >= 4
            # No text has characters that are unassigned or for private use, as CP1252's ¡H.
            if not counts or (is_chinese and not any(unicodedata.category(c) in ("Cn", "Co") for c in counts)):
                return encoding
        if encoding == "utf-8-sig":
            _reject_damaged_utf8(files)
    wrong = given or ("UTF-8, nor Chinese that is surely GB18030" if len(candidates) > 1 else "UTF-8")
    remedy = "save it as a text file in UTF-8, or name its encoding with --encoding, such as gb18030, cp1252 or utf-16"
    raise ValueError(f"is not {wrong}: {remedy}")


def _reject_damaged_utf8(files: Collection[str]) -> None:
    """Raise an error if UTF-8 is the encoding of most lines: in another one, these lines would be wrong."""
    valid, damaged = 0, list[str]()
    for file in files:
        with fsspec.open(file, "rb", compression="infer") as stream:
            for number, line in enumerate(stream, 1):
                try:
                    valid += not line.isascii() and bool(line.decode())
                except UnicodeDecodeError:
                    damaged.append(f"{Path(file).name}: line {number}")
    if 0 < len(damaged) < valid:
        more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
        raise ValueError(f"{damaged[0]}{more} is not UTF-8, but most lines are: correct or remove it")
