"""The environment variables that torchrun sets for each process."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ..common.cores import usable_cores
from ..common.errors import UserError, shorten

# The variables of a job of one process, which torch and accelerate read.
SINGLE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
SINGLE_PROCESS |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # any free port


def started_by_torchrun() -> bool:
    """Whether a launcher started this process: plain `python -m …` sets no RANK."""
    return "RANK" in os.environ


def rank_and_sizes() -> tuple[int, int, int, int]:
    """Return RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, by default of a single process.

    Raises:
        UserError: torchrun's variables are invalid, or only some of them are set.
    """
    if not started_by_torchrun() and os.environ.get("WORLD_SIZE", "1") == "1":
        return 0, 1, 0, 1
    values = {name: os.environ.get(name, "") for name in SINGLE_PROCESS}
    with suppress(ValueError):
        rank, size, local_rank, local_size, port = (int(text) for name, text in values.items() if name != "MASTER_ADDR")
        if 0 <= rank < size and 0 <= local_rank < local_size and port >= 0 and values["MASTER_ADDR"]:
            return rank, size, local_rank, local_size
    given = ", ".join(f"{name}={shorten(text, 20)!r}" for name, text in values.items())
    raise UserError(f"{given} name no rank: start with torchrun, which sets all of these variables, or unset them")


def default_threads(ranks: int) -> int:
    """Return the CPU threads of a rank without `--threads`: the cores of the node, divided by `ranks`."""
    # torchrun binds each rank to the cores next to its GPU, so torchrun's own cores are counted.
    launcher = os.getppid() if "TORCHELASTIC_RESTART_COUNT" in os.environ else 0
    return max(1, len(usable_cores(launcher)) // ranks)


def launcher_id() -> str | None:
    """Return the folder of temporary files of the torchrun that started this rank; None without torchrun.

    It has a random name and stays the same when torchrun restarts its workers: by it, a restarted job recognizes its
    own run folder. The id of torchrun's rendezvous is `none` by default, in every job.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # FOLDER/attempt_0/0/error.json; others set it, too
    return str(Path(file).parents[2]) if file and "TORCHELASTIC_RESTART_COUNT" in os.environ else None
