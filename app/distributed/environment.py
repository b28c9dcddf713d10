"""The environment variables that torchrun sets for each process. No other file reads them."""

from __future__ import annotations

import os
import socket

import psutil

from app.errors import UserError, shorten

LOWEST = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 0}
LOWEST |= {"TORCHELASTIC_RESTART_COUNT": 0}
NEEDED_BY_RANK = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SINGLE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
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


def started_by_torchrun() -> bool:
    """Whether a launcher started this process: plain `python -m …` sets no RANK."""
    return "RANK" in os.environ


def become_single_process() -> None:
    """Set the variables of a job of one process, which accelerate reads."""
    os.environ.update(SINGLE_PROCESS)


def rank_and_sizes() -> tuple[int, int, int, int]:
    """Return RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, or those of a single process."""
    rank, size, local_rank, local_size = (int(os.environ.get(name, alone)) for name, alone in SINGLE_PROCESS.items())
    return rank, size, local_rank, local_size


def launcher_id() -> str | None:
    """Identify the torchrun process that started this rank.

    The id stays the same when torchrun restarts its workers, even if the ranks' store does not survive. A run folder
    records the ids of its job, so that a restarted job recognizes its own folder.

    Returns:
        Host name, process id and start time; None without torchrun, which alone restarts processes.
    """
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        return None
    parent = psutil.Process(os.getppid())
    # create_time() alone moves with the system clock.
    return f"{socket.gethostname()}:{parent.pid}:{parent.create_time() - psutil.boot_time():.2f}"
