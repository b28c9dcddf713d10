"""Which cases of a parametrized test are slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_after(n: int, cases: Iterable[Any]) -> list[Any]:
    """Mark all cases but the first `n` as slow. A case is a value, or a tuple of values for several arguments."""
    return [
        case if i < n else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for i, case in enumerate(cases)
    ]
