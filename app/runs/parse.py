"""Parse the JSON of a run folder, which is untrusted: everything is checked before it is used."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..common.errors import UserError
from . import schema
from .schema import JsonFormat


def parse_object(text: str, location: str, file: JsonFormat) -> dict[str, Any]:
    """Parse a JSON object, and check its keys and the kinds of their values.

    Args:
        location: the file and line, for the error message.

    Raises:
        UserError: it is damaged, a required key is missing, or a value is of another kind.
    """
    try:
        content = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as problem:
        raise UserError(f"{location}: damaged or incomplete: {problem}") from None
    if not isinstance(content, dict):
        raise UserError(f"{location}: damaged: not a JSON object")
    missing = [key for key in file.required if key not in content]
    if missing:
        raise UserError(f"{location}: lacks {', '.join(missing)}")
    present = {key: kind for key, kind in file.optional.items() if content.get(key) is not None}
    for key, kind in {**file.required, **present}.items():
        if not IS_KIND[kind](content[key]):
            raise UserError(f"{location}: {key} is {str(content[key])[:80]!r}, not {kind}")
    return dict(content)


def _finite(text: str) -> float:
    value = float(text)
    if not abs(value) <= sys.float_info.max:
        raise ValueError(f"{text} is not a finite number")
    return value


def _is_number(value: Any) -> bool:
    # JSON's integers have no limit.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list(value: Any, is_element: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_element, value))


IS_KIND: Mapping[str, Callable[[Any], bool]] = {
    schema.NUMBER: _is_number,
    schema.INTEGER: _is_integer,
    schema.TEXT: _is_text,
    schema.OBJECT: lambda value: isinstance(value, dict),
    schema.NUMBERS: lambda value: _is_list(value, _is_number) and len(value) > 0,
    schema.TEXTS_BY_NAME: lambda value: isinstance(value, dict) and all(_is_list(v, _is_text) for v in value.values()),
    schema.INTEGERS_BY_NAME: lambda value: isinstance(value, dict) and all(map(_is_integer, value.values())),
    schema.TEXTS: lambda value: _is_list(value, _is_text),
    schema.NAMES: lambda value: _is_list(value, _is_text) and len(set(value)) == len(value) > 0,
    schema.INTEGER_ROWS: lambda value: _is_list(value, lambda row: _is_list(row, _is_integer)),
}
