"""Helpers of planted_defects.py and planted_races.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

RANK = int(os.environ.get("RANK", 0))
SIZE = 1000
Function = Callable[[], Any]
ALL: dict[str, Function] = {}  # in the order in which they run


def planted(function: Function) -> Function:
    """Add a function to those that are run."""
    ALL[function.__name__] = function
    return function


def on_gpu() -> torch.Tensor:
    return torch.ones(SIZE, device="cuda")
