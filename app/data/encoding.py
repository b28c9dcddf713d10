"""Recognize the encoding of CSV and JSON files."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

import fsspec
from charset_normalizer.constant import FREQUENCIES

# Chinese text in GB18030 is hardly ever valid UTF-8, but many texts in UTF-8 are valid GB18030.
ENCODINGS = {"csv": ("utf-8-sig", "gb18030"), "json": ("utf-8-sig",)}
FREQUENT = frozenset(FREQUENCIES["Chinese"])  # about a third of the characters of Chinese texts


def recognize_encoding(files: Collection[str], given: str | None, candidates: Sequence[str]) -> str:
    """Return the encoding of all files: UTF-8 or, if they are not, the given one, or GB18030 if that is plausible."""
    utf8, others, has_wide = list[str](), list[str](), False  # files that are not only ASCII
    for file in files:
        n_valid, invalid, name = 0, list[int](), Path(file).name
        with fsspec.open(file, "rb", compression="infer") as stream:
            for number, line in enumerate(stream, 1):
                try:
                    if b"\x1b$" in line or b"\0" in line[:2]:  # ISO-2022 and UTF-16 are valid ASCII
                        raise UnicodeError
                    if not line.isascii():
                        has_wide |= max(line.decode()) >= "\u0800"  # as hardly any line in another encoding, by chance
                        n_valid += 1
                except UnicodeError:
                    invalid.append(number)
        if 0 < len(invalid) < n_valid:
            raise ValueError(f"{name}: line {invalid[0]} is not UTF-8, but most lines are: correct or remove it")
        (others if invalid else utf8 if n_valid else []).append(name)
    if utf8 and others:
        raise ValueError(f"{others[0]} is not UTF-8, but {utf8[0]} is: save all files in UTF-8")
    if utf8 or not (others or given):
        return "utf-8-sig"
    encoding, counts, is_valid = given or candidates[-1], Counter[str](), True
    try:
        for file in files:
            with fsspec.open(file, "rt", encoding=encoding, compression="infer") as stream:
                for line in stream:
                    counts.update("" if given else line)  # only GB18030 has to be plausible
    except UnicodeError:
        is_valid = False
    letters = sum(n for c, n in counts.items() if c.isalpha() and not c.isascii())
    is_chinese = letters <= 8 * sum(counts[c] for c in FREQUENT) and len(FREQUENT & counts.keys()) >= 4
    # No text has characters that are unassigned or for private use, as CP1252's ¡H.
    is_text = not any(unicodedata.category(c) in ("Cn", "Co") for c in counts)
    if is_valid and (given or (is_chinese and is_text and not has_wide)):
        return encoding
    if not others:  # all are ASCII, which is not valid in the given encoding
        return "utf-8-sig"
    wrong = given or ("UTF-8, nor Chinese that is surely GB18030" if len(candidates) > 1 else "UTF-8")
    remedy = "save it as a text file in UTF-8, or name its encoding with --encoding, such as gb18030, cp1252 or utf-16"
    raise ValueError(f"{others[0]}: is not {wrong}: {remedy}")
