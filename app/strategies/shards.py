"""This rank's shard of a tensor. FSDP2 divides the rows (the first dimension) of each parameter."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of this rank's shard of a tensor, or of all of it if it is not sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # otherwise autograd records the operation, which takes longer than the operation
        local: torch.Tensor = tensor.to_local()
    return local


def rows_of(tensor: torch.Tensor) -> tuple[int | None, int]:
    """Return the first row and the number of rows of this rank's shard; (None, 0) if the tensor is not sharded."""
    if not isinstance(tensor, DTensor):
        return None, 0
    mesh = tensor.device_mesh
    return divide_rows(tensor.shape[0], mesh.get_local_rank(), mesh.size())


def divide_rows(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first row of a rank and the number of its rows."""
    chunk = -(-rows // ranks)  # as torch.chunk does: the last ranks may have fewer rows, or none
    start = min(rank * chunk, rows)
    return start, min(chunk, rows - start)
