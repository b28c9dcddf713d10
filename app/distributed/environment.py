"""The variables that torchrun sets for each process, checked before anything relies on them."""

from __future__ import annotations

import os

from app.errors import UserError
from app.settings import shorten

LOWEST = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 0}
LOWEST |= {"TORCHELASTIC_RESTART_COUNT": 0}
NEEDED_BY_RANK = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
REMEDY = "start with torchrun, or unset it"


def check_environment() -> None:
    """Check the environment variables that torchrun sets.

    Raises:
        UserError: a variable is empty, no whole number, out of range, or set without the variables that it requires.
    """
    values = {name: _number(name, os.environ[name], LOWEST[name]) for name in LOWEST if name in os.environ}
    rank, size = values.get("RANK"), values.get("WORLD_SIZE", 1)
    if rank is None:
        if size > 1:
            raise UserError(f"WORLD_SIZE={size} is set, but RANK is not: {REMEDY}")
        return
    for name in NEEDED_BY_RANK:
        if not os.environ.get(name):
            raise UserError(f"RANK={rank} is set, but {name} is not: {REMEDY}")
    for place, count in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if values[place] >= values[count]:
            raise UserError(f"{place}={values[place]}: must be less than {count}={values[count]}: {REMEDY}")


def _number(name: str, text: str, lowest: int) -> int:
    # At most 9 digits: every count of processes, and what int() takes.
    if text.isascii() and text.isdecimal() and len(text) <= 9 and int(text) >= lowest:
        return int(text)
    raise UserError(f"{name}={shorten(text)!r}: must be a whole number, {lowest} or more: {REMEDY}")
