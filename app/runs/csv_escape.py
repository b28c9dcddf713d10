"""Untrusted text in CSV files: a spreadsheet shows it but never runs it.

A spreadsheet runs a cell that begins with one of `=+-@` or with a full-width form of these (OWASP, CSV injection).
It depends on the locale whether commas, semicolons or tabs separate the cells of a line. Quotes do not protect if the
spreadsheet uses another separator, because its cells then begin elsewhere. So `escape` inserts a `'` before every such
character that could be the first of a cell under any of these separators: it follows the start of the text or a
separator, with only white space, invisible characters and quotes between them.
"""

from __future__ import annotations

import re

FORMULA = "=+-@＝＋－＠"
SEPARATORS = r",;\t\n\x0b\x0c\r\x1c-\x1e\x85\u2028\u2029"  # and all kinds of line ends
# White space, control and format characters, variation selectors.
INVISIBLE = r"\s\x00-\x1f\x7f-\x9f\u00ad\u061c\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff"
QUOTES = "\"'“”‘’＂＇"
# The possessive quantifier prevents backtracking, so that matching takes linear time.
_BEFORE_A_CELL = re.compile(rf"(?:\A|[{SEPARATORS}])[{SEPARATORS}{INVISIBLE}{QUOTES}]*+")
_NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?")


def escape(text: str) -> str:
    """Insert a `'` before each character that could begin a formula. A plain number, such as -1, is left unchanged."""
    if _NUMBER.fullmatch(text):
        return text
    return _BEFORE_A_CELL.sub(
        lambda match: match[0] + ("'" if text[match.end() : match.end() + 1] in tuple(FORMULA) else ""), text
    )
