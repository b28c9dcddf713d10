"""The environment variables that torchrun sets for each process."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import psutil

from ..common.cores import usable_cores
from ..common.errors import UserError, shorten

SINGLE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
REMEDY = "start with torchrun, or unset it"


def check_environment() -> None:
    """Raise `UserError` if a variable is invalid, or set without the variables that it requires."""
    for name in (*SINGLE_PROCESS, "MASTER_PORT"):
        text = os.environ.get(name, "0")
        # At most 9 digits: enough for any number of processes, and int() rejects very long numbers.
        if not (text.isascii() and text.isdecimal() and len(text) <= 9):
            raise UserError(f"{name}={shorten(text)!r}: must be a whole number: {REMEDY}")
    rank, size, local_rank, local_size = rank_and_sizes()
    if "RANK" in os.environ:
        for name in (*SINGLE_PROCESS, "MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise UserError(f"RANK={rank} is set, but {name} is not: {REMEDY}")
    if rank >= size or local_rank >= local_size:
        problem = f"RANK={rank} of WORLD_SIZE={size}, LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE={local_size}"
        raise UserError(f"{problem}: a rank must be less than the number of ranks: {REMEDY}")
    if "RANK" not in os.environ and size > 1:
        raise UserError(f"WORLD_SIZE={size} is set, but RANK is not: {REMEDY}")


def drop_accelerate_variables() -> list[str]:
    """Remove the variables that `accelerate launch` exports, and return their names.

    Trainer and accelerate read them and the hand-written loop does not, so the two paths would train differently.
    """
    names = [name for name in os.environ if name.startswith("ACCELERATE_")]
    for name in names:
        del os.environ[name]
    return names


def started_by_torchrun() -> bool:
    """Whether a launcher started this process: plain `python -m …` sets no RANK."""
    return "RANK" in os.environ


def become_single_process() -> None:
    """Set the variables of a job of one process, which accelerate reads."""
    os.environ.update(SINGLE_PROCESS)


def rank_and_sizes() -> tuple[int, int, int, int]:
    """Return RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, by default of a single process."""
    rank, size, local_rank, local_size = (int(os.environ.get(name, alone)) for name, alone in SINGLE_PROCESS.items())
    return rank, size, local_rank, local_size


def split_off_local_rank(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide a command line into the program's own arguments and the `--local-rank=N` of torch.distributed.launch."""
    added = [text for text in arguments if text.startswith(("--local-rank=", "--local_rank="))]
    return [text for text in arguments if text not in added], added


def default_threads(ranks: int) -> int:
    """Return the CPU threads of a rank without `--threads`: the cores of the node, divided by `ranks`."""
    # torchrun binds each rank to the cores next to its GPU, so torchrun's own cores are counted.
    launcher = os.getppid() if "TORCHELASTIC_RESTART_COUNT" in os.environ else 0
    return max(1, len(usable_cores(launcher)) // ranks)


def launcher_id() -> str | None:
    """Return host name, process id and start time of the torchrun that started this rank; None without torchrun.

    They stay the same when torchrun restarts its workers. A run folder records them, so that a restarted job recognizes
    its own folder.
    """
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        return None
    parent = psutil.Process(os.getppid())
    # Relative to the boot time: create_time() changes if the system clock is adjusted.
    return f"{socket.gethostname()}:{parent.pid}:{parent.create_time() - psutil.boot_time():.2f}"
