"""The collectives that the rest of the code needs. Every rank must call each of them, never under `if rank == 0`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ..common.errors import AgreedError, UserError
from .topology import RankGroup
from .world import World

T = TypeVar("T")
# PyTorch 2.13 has renamed them.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
POLL_SECONDS = 0.0005

# ---- objects -------------------------------------------------------------------------------------------------------


def all_gather_object(value: T, world: World) -> list[T]:
    """Return every rank's value (any picklable object), in rank order, on every rank."""
    values: list[T] = [value] * world.size
    dist.all_gather_object(values, value, group=world.control_group)
    return values


def broadcast_object(value: T, world: World) -> T:
    """Return rank 0's value on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0, group=world.control_group)
    return values[0]


def barrier(world: World) -> None:
    """Wait until every rank has called this."""
    all_gather_object(None, world)


# ---- errors that all ranks raise together --------------------------------------------------------------------------


def first_failure(problem: str | None, world: World) -> str | None:
    """Return the problem of the lowest rank that has one, with its rank, on every rank; None if no rank has one."""
    for rank, text in enumerate(all_gather_object(problem, world)):
        if text is not None:
            return text if rank == 0 else f"rank {rank}: {text}"
    return None


def raise_if_any_failed(problem: str | None, world: World) -> None:
    """Raise `AgreedError` on every rank if any rank has a problem; each rank passes its own or None."""
    reported = first_failure(problem, world)
    if reported is not None:
        raise AgreedError(reported)


@contextmanager
def raise_on_all_ranks(world: World) -> Iterator[None]:
    """Turn a `UserError` of any rank inside the block into an `AgreedError` on every rank.

    Otherwise the other ranks would wait for a rank that has failed. The block must not contain a collective.
    """
    problem = None
    try:
        yield
    except AgreedError:
        raise
    except UserError as error:
        problem = str(error)
    raise_if_any_failed(problem, world)


@contextmanager
def local_main_process_first(world: World) -> Iterator[None]:
    """Run the block on one process per node first, then on the others, which find its result in the cache.

    Errors are raised as by `raise_on_all_ranks`.
    """
    problem = None
    if world.local_rank != 0:
        raise_if_any_failed(None, world)
    try:
        yield
    except UserError as error:
        problem = str(error)
    if world.local_rank == 0:
        raise_if_any_failed(problem, world)
        problem = None
    raise_if_any_failed(problem, world)


# ---- tensors -------------------------------------------------------------------------------------------------------


def wait_for_device(world: World) -> None:
    """Wait until this rank's device has done what was enqueued so far, but no longer than `--ddp_timeout`.

    Call it before the host reads the result of a collective. Such a read would block inside CUDA, where Python cannot
    raise, until NCCL's watchdog aborts the process (see `nccl_timeout`).

    Raises:
        DistBackendError: the device hasn't finished, so some rank did not join a collective.
    """
    if world.device.type != "cuda":
        return
    event = torch.cuda.Event()
    event.record()
    deadline = time.monotonic() + world.timeout.total_seconds()
    while not event.query():
        if time.monotonic() > deadline:
            seconds = world.timeout.total_seconds()
            raise dist.DistBackendError(f"NCCL: a collective did not finish within {seconds:.0f} s")
        time.sleep(POLL_SECONDS)


def reduce_sum(values: torch.Tensor, world: World) -> torch.Tensor:
    """Sum a tensor of any shape and dtype over the ranks, in place, on every rank."""
    dist.all_reduce(values, op=dist.ReduceOp.SUM)
    wait_for_device(world)  # every caller reads the result next
    return values


def all_gather(values: torch.Tensor, world: World) -> torch.Tensor:
    """Return the tensors of all ranks, which have the same shape and dtype, stacked in rank order."""
    gathered = values.new_empty(world.size * values.numel())  # flat: gloo cannot gather into further dimensions
    all_gather_single(gathered, values.flatten())
    wait_for_device(world)  # every caller reads the result next
    return gathered.view(world.size, *values.shape)


def all_gather_in_place(rows: torch.Tensor, ranks: RankGroup, async_op: bool = False) -> list[dist.Work | None]:
    """Copy row r of rank r to every rank of a group, for each rank r.

    Args:
        rows: shape (number of ranks, n). Only this rank's row is read.
        ranks: the group.
        async_op: whether to return at once.

    Returns:
        What to wait for, if `async_op` is set.
    """
    if rows.is_cuda:
        return [all_gather_single(rows.view(-1), rows[ranks.rank], group=ranks.group, async_op=async_op)]
    # gloo's all-gather would receive the rows elsewhere and copy them.
    return [dist.broadcast(row, group_src=rank, group=ranks.group, async_op=async_op) for rank, row in enumerate(rows)]


def reduce_mean(values: torch.Tensor, world: World) -> torch.Tensor:
    """Average a floating-point tensor over the ranks, in place, on every rank.

    gloo has no AVG, so there the sum is divided by the number of ranks.
    """
    if dist.get_backend() == "nccl":
        dist.all_reduce(values, op=dist.ReduceOp.AVG)
        wait_for_device(world)
        return values
    return reduce_sum(values, world).div_(world.size)


def broadcast_buffers(model: torch.nn.Module, world: World) -> None:
    """Copy rank 0's buffers, such as the running statistics of BatchNorm, to every rank.

    DDP does this before each forward pass in training, so after a step every rank has statistics of its own rows. Rank
    0's are saved.
    """
    saved = model.state_dict().keys()
    buffers = [buffer for name, buffer in model.named_buffers() if name in saved]
    for buffer in buffers:
        dist.broadcast(buffer, src=0)
    if buffers:
        wait_for_device(world)


def gather_rows(
    positions: Sequence[int], shard: Sequence[torch.Tensor], n: int, *, world: World
) -> NDArray[np.float64]:
    """Gather the rows that each rank holds and put them in order, on every rank.

    Args:
        positions: the position of each of this rank's rows among all n. A negative position marks a filler row.
        shard: this rank's batches of rows, each (rows, columns), in the order of `positions`.
        n: the number of rows on all ranks together.

    Returns:
        float64 (n, columns).
    """
    if shard:
        wait_for_device(world)  # the rows of all batches are copied to the host at once
    mine = torch.cat(list(shard)).double().cpu().numpy() if shard else None
    gathered: NDArray[np.float64] | None = None
    seen = np.zeros(n, dtype=np.int64)
    for places, rows in all_gather_object((np.asarray(positions, dtype=np.int64), mine), world):
        if rows is not None:
            gathered = np.empty((n, rows.shape[1])) if gathered is None else gathered
            gathered[places] = rows
            np.add.at(seen, places, 1)
    assert gathered is not None, "no rank has evaluated anything"
    assert (seen == 1).all(), "a row was evaluated twice or not at all"
    return gathered
