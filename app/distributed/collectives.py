"""Collectives, also to write files. Every rank must call each of them, never under `if rank == 0`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors import SafetensorError

from ..common.errors import AgreedError, RunError, UserError, escape_control_characters
from ..common.machine import arithmetic
from .world import RankGroup, World

T = TypeVar("T")
# PyTorch 2.13 has renamed it.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
POLL_SECONDS = 0.0005


def all_gather_object(value: T, world: World) -> list[T]:
    """Return every rank's value (any picklable object), in rank order, on every rank."""
    values: list[T] = [value] * world.size
    dist.all_gather_object(values, value, group=world.control_group)
    return values


def barrier(world: World) -> None:
    """Wait until every rank has called this."""
    all_gather_object(None, world)


def raise_if_any_failed(problem: str | None, world: World, error: type[Exception] = AgreedError) -> None:
    """Raise the problem of the lowest rank that has one on every rank; each rank passes its own or None."""
    for rank, text in enumerate(all_gather_object(problem, world)):
        if text is not None:
            raise error(text if rank == 0 else f"rank {rank}: {text}")


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


def broadcast_object(compute: Callable[[], T], world: World) -> T:
    """Call a function on rank 0 and return its value on every rank. Errors are raised as by `raise_on_all_ranks`."""
    values: list[Any] = [None]
    with raise_on_all_ranks(world):
        values = [compute() if world.is_main_process else None]
    dist.broadcast_object_list(values, src=0, group=world.control_group)
    return values[0]  # type: ignore[no-any-return]


@contextmanager
def local_main_process_first(world: World) -> Iterator[None]:
    """Run the block on one process per node first, then on the others, which find its result in the cache.

    Errors are raised as by `raise_on_all_ranks`.
    """
    if world.local_rank != 0:
        raise_if_any_failed(None, world)
    with raise_on_all_ranks(world):
        yield
    if world.local_rank == 0:
        raise_if_any_failed(None, world)


def wait_for_device(world: World) -> None:
    """Wait until this rank's device has finished all enqueued work, but no longer than `--ddp_timeout`.

    Call it before the host reads the result of a collective. Such a read would block inside CUDA, where Python cannot
    raise, until NCCL's watchdog aborts the process (see `process_group`).

    Raises:
        DistBackendError: the device has not finished, so some rank did not join a collective.
    """
    if world.device.type != "cuda":
        return
    event = torch.cuda.Event()
    event.record()
    seconds = world.timeout.total_seconds()
    deadline = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > deadline:
            raise dist.DistBackendError(f"NCCL: a collective did not finish within {seconds:.0f} s")
        time.sleep(POLL_SECONDS)


def all_gather_in_place(rows: torch.Tensor, ranks: RankGroup, async_op: bool = False) -> list[dist.Work | None]:
    """Copy row r of rank r, for each rank r of a group, to every rank. `rows` has the shape (number of ranks, n)."""
    if rows.is_cuda:
        return [all_gather_single(rows.view(-1), rows[ranks.rank], group=ranks.group, async_op=async_op)]
    # gloo's all-gather would receive the rows elsewhere and copy them.
    return [dist.broadcast(row, group_src=rank, group=ranks.group, async_op=async_op) for rank, row in enumerate(rows)]


def saved_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that belong to the model's state, by name. Others, such as position ids, are constants."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def broadcast_buffers(model: torch.nn.Module, world: World) -> None:
    """Copy rank 0's buffers, such as the running statistics of BatchNorm, to every rank.

    DDP does this before each forward pass in training, so after a step each rank has the statistics of its own rows.
    """
    buffers = saved_buffers(model)
    for buffer in buffers.values():
        dist.broadcast(buffer, src=0)
    if buffers:
        wait_for_device(world)


def gather_rows(positions: Sequence[int], shard: torch.Tensor, n: int, *, world: World) -> NDArray[np.float64]:
    """Gather the rows of all ranks and put them in order, on every rank.

    Args:
        positions: the position of each of this rank's rows among all n.
        shard: this rank's rows, float64 (rows, columns), in the order of `positions`.
        n: the number of rows on all ranks together.

    Returns:
        float64 (n, columns).
    """
    wait_for_device(world)
    parts = all_gather_object((np.asarray(positions, dtype=np.int64), shard.cpu().numpy()), world)
    order, rows = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    assert np.array_equal(np.sort(order), np.arange(n)), "a row was evaluated twice or not at all"
    in_order: NDArray[np.float64] = rows[np.argsort(order)]
    return in_order


def gather_arithmetic(world: World) -> dict[str, list[str]]:
    """Return the distinct values of each fact of `arithmetic` over all ranks. Collective."""
    by_rank = all_gather_object(arithmetic(world.device), world)
    return {name: sorted({facts[name] for facts in by_rank}) for name in by_rank[0]}


def stop_or_warn(path: Path, problem: OSError, on_failure: str, *, warn: Callable[[str], None], note: str = "") -> None:
    """Report that a path could not be written: as a warning, or as a `RunError` if `on_failure` is `stop`."""
    message = f"{path} could not be written: {problem.strerror or problem}{note}"
    if on_failure == "stop":
        raise RunError(message) from None
    warn(f"warning: {escape_control_characters(message)}; training continues (--on_save_failure continue)")


def write_on_ranks(work: Callable[[], None], world: World, *, main_only: bool = False) -> None:
    """Do the work on every rank, or only on rank 0. Collective.

    Raises:
        OSError: on every rank, with the problem of the lowest rank that has one.
    """
    problem = None
    if world.is_main_process or not main_only:
        try:
            work()
        except (OSError, SafetensorError) as error:
            problem = " ".join(str(error).split()) or type(error).__name__
    raise_if_any_failed(problem, world, OSError)
