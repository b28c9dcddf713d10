"""Which values a setting may have: `app.setting_groups` gives each field its own rule.

A rule returns the problem of a value, to be read after the name of its flag, or None if the value is valid.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from .errors import shorten

Rule = Callable[[Any], str | None]

LARGEST_RATIO = 1e30  # of two class weights
LARGEST_COUNT = 2**31 - 1  # every library used here accepts counts and seeds up to this value


def number(accepts: Callable[[Any], bool], requirement: str) -> Rule:
    """Return the rule of a finite number; `requirement` follows "must be"."""

    def check(value: Any) -> str | None:
        # math.isfinite would raise for integers that are too large for a float.
        if abs(value) <= sys.float_info.max and accepts(value):
            return None
        return f" {shorten(str(value))}: must be {requirement}"

    return check


def between(low: float, high: float) -> Rule:
    """Accept both ends as well."""
    return number(lambda x: low <= x <= high, f"between {low} and {high}")


def above(low: float, requirement: str | None = None) -> Rule:
    return number(lambda x: x > low, requirement or f"above {low}")


def at_least(low: float, below: float = math.inf, requirement: str | None = None) -> Rule:
    text = f"{low} or more" + (f" and below {below}" if below < math.inf else "")
    return number(lambda x: low <= x < below, requirement or text)


def count(low: int = 1, noun: str = "") -> Rule:
    """Accept numbers from `low` on that every library can represent. `noun` names the unit, such as "tokens"."""
    amount = f"{low} {noun}".rstrip()
    return number(lambda n: low <= n <= LARGEST_COUNT, f"{amount} or more and at most {LARGEST_COUNT}")


def name_of(thing: str) -> Rule:
    """Reject the empty text that an unset shell variable leaves: `--output_dir "$FOLDER"`."""
    return lambda text: None if text else f" is empty: must name {thing}"


def split_names(text: str) -> list[str]:
    """Return the names in a text such as `tensorboard,wandb`."""
    return [name.strip() for name in text.split(",")]


def names_among(*choices: str) -> Rule:
    """Accept one or more of the names, separated by commas."""

    def check(text: str) -> str | None:
        if set(split_names(text)) <= set(choices):
            return None
        return f" {shorten(text) or 'is empty'}: must be one or more of {', '.join(choices)}, separated by commas"

    return check


def is_utf8(text: str) -> str | None:
    """Reject bytes that are not UTF-8, which Python represents as lone surrogates."""
    if text == text.encode("utf-8", "ignore").decode():
        return None
    return f" {text}: must be valid UTF-8, which safetensors requires"


def split_label_names(text: str) -> dict[str, str]:
    """Return the names in a text such as `0=negative,1=positive`, by label.

    Raises:
        ValueError: it has another form.
    """
    pairs = [pair.partition("=") for pair in text.split(",")] if text else []
    names = {label.strip(): name.strip() for label, _, name in pairs}
    if "" in {*names, *names.values()} or len(names) < len(pairs):
        raise ValueError(text)
    return names


def label_names(text: str) -> str | None:
    try:
        split_label_names(text or "=")
    except ValueError:
        return f" {shorten(text) or 'is empty'}: must name each label once, such as 0=negative,1=positive"
    return is_utf8(text)


def split_class_weights(text: str) -> list[float]:
    """Return the numbers in a text such as `1,2.5`.

    Raises:
        ValueError: it has another form.
    """
    return [float(weight) for weight in text.split(",")]


def class_weights(text: str) -> str | None:
    given = shorten(text) or "is empty"
    try:
        weights = [1.0] if text == "balanced" else split_class_weights(text)
    except ValueError:
        weights = [0.0]
    if not all(0 < weight <= sys.float_info.max for weight in weights):
        return f" {given}: must be `balanced`, or one number above 0 per class, such as 1,2.5"
    # In fp32, the loss of a batch without the largest weight would not be finite.
    if max(weights) / LARGEST_RATIO > min(weights):
        return f" {given}: the largest must be at most {LARGEST_RATIO:g} times the smallest"
    return None


def path_of(thing: str) -> Rule:
    return lambda text: name_of(thing)(text) or is_utf8(text)
