"""How many processes a job has on a node: one per GPU, as far as the batch can be divided among them."""

from __future__ import annotations

from ..common.errors import UserError, shorten
from ..settings import Settings

CPU_PROCESSES = 2


def default_nproc_per_node(settings: Settings, nodes: int = 1) -> int:
    """Return the number of GPUs if there are any, otherwise 2; fewer if the batch cannot be divided among so many.

    Raises:
        UserError: this machine has an accelerator that cannot be used.
    """
    if not settings.use_cpu:
        from ..common.machine import unusable_accelerator  # here, because it imports torch

        if (problem := unusable_accelerator()) is not None:
            raise UserError(problem)
    most = count_gpus(settings.use_cpu) or CPU_PROCESSES
    return next((n for n in range(most, 0, -1) if settings.divides_among(n * nodes)), most)


def resolve_nproc_per_node(value: str, settings: Settings, nodes: str = "1") -> int:
    """Convert the value of `--nproc_per_node`, `auto` or a number, to a number of processes.

    Args:
        nodes: the number of nodes. Of a range such as `1:2`, the largest number counts.

    Raises:
        UserError: neither `auto` nor a positive whole number.
    """
    if value == "auto":
        largest = nodes.rpartition(":")[2]
        return default_nproc_per_node(settings, int(largest) if largest.isdecimal() else 1)
    # At most 4 digits: int() rejects very long numbers.
    if value.isascii() and value.isdecimal() and len(value) <= 4 and int(value) > 0:
        return int(value)
    raise UserError(f"--nproc_per_node {shorten(value)}: must be auto or a whole number, 1 or more")


def count_gpus(use_cpu: bool) -> int:
    """Return the number of GPUs that a job may use, without creating a CUDA context, which would occupy memory."""
    if use_cpu:
        return 0
    import torch  # here: --help and a user's mistake need not wait for it

    return torch.cuda.device_count()  # asks the driver
