"""Untrusted text in CSV files: a spreadsheet shows it and never runs it, and it can be read back exactly.

A spreadsheet runs a cell that begins with one of `=+-@` or with a full-width form of these (OWASP, CSV injection).
Where it splits a line depends on the locale: commas, semicolons or tabs. Quotes give no protection if the spreadsheet
uses another separator: the cell that they belong to begins elsewhere. So `escape` inserts a `'` before every such
character that could be the first of a cell in any of these readings: one that follows the start of the text or a
separator, with only white space, invisible characters and quotes between them.
"""

from __future__ import annotations

import re

FORMULA = "=+-@＝＋－＠"
SEPARATORS = r",;\t\n\x0b\x0c\r\x1c-\x1e\x85\u2028\u2029"  # and whatever else ends a line somewhere
# White space, control and format characters, variation selectors.
INVISIBLE = r"\s\x00-\x1f\x7f-\x9f\u00ad\u061c\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff"
QUOTES = "\"'“”‘’＂＇"
# The possessive quantifier prevents backtracking, so that matching takes linear time.
_BEFORE_A_CELL = re.compile(rf"(?:\A|[{SEPARATORS}])[{SEPARATORS}{INVISIBLE}{QUOTES}]*+")
_NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?")


def escape(text: str) -> str:
    """Return the text with a `'` before what could begin a formula. A plain number, such as -1, stays as it is."""
    if _NUMBER.fullmatch(text):
        return text
    return _BEFORE_A_CELL.sub(lambda match: match[0] + ("'" if _is_formula_at(text, match.end()) else ""), text)


def unescape(cell: str) -> str:
    """Return the text that `escape` was given."""
    return _BEFORE_A_CELL.sub(
        lambda match: match[0].removesuffix("'") if _is_formula_at(cell, match.end()) else match[0], cell
    )


def _is_formula_at(text: str, position: int) -> bool:
    return text[position : position + 1] in tuple(FORMULA)
