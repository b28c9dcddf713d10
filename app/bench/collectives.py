"""Sections on messages: what each collective does to every rank's memory, and how long it takes by its size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist

from ..common.formats import format_size
from ..distributed.collectives import (
    all_gather_in_place,
    all_gather_object,
    all_gather_single,
    reduce_scatter_single,
    wait_for_device,
)
from ..distributed.world import World
from ..strategies.reduction import reduce_scatter_pairwise
from .core import Lab

# What a rank holds before and after: all chunks, its own one, or all of them on rank 0 only. And the factor between
# bytes / seconds and the speed of a link, for N ranks (nccl-tests, doc/PERFORMANCE.md).
COLLECTIVES: dict[str, tuple[str, str, Callable[[int], float]]] = {
    "scatter": ("root", "own", lambda n: (n - 1) / n),
    "gather": ("own", "root", lambda n: (n - 1) / n),
    "reduce": ("all", "all", lambda n: 1.0),
    "broadcast": ("all", "all", lambda n: 1.0),
    "all-reduce": ("all", "all", lambda n: 2 * (n - 1) / n),
    "reduce-scatter": ("all", "own", lambda n: (n - 1) / n),
    "all-gather": ("own", "all", lambda n: (n - 1) / n),
    "all-to-all": ("all", "all", lambda n: (n - 1) / n),
}
ELEMENT = 4  # bytes of an fp32 number


def calls_on(complete: torch.Tensor, other: torch.Tensor, world: World) -> dict[str, Callable[[], object]]:
    """Return each collective on tensors of shape (ranks, n). The rank's own chunk is the first row of `other`.

    The last two are what the strategies here call instead of the collective that is named up to the comma.
    """
    own, chunks = other[0], list(complete) if world.is_main_process else None
    return {
        "scatter": partial(dist.scatter, own, chunks, src=0),
        "gather": partial(dist.gather, own, chunks, dst=0),
        "reduce": partial(dist.reduce, complete, dst=0),
        "broadcast": partial(dist.broadcast, complete, src=0),
        "all-reduce": partial(dist.all_reduce, complete),
        "reduce-scatter": partial(reduce_scatter_single, own, complete.view(-1)),
        "all-gather": partial(all_gather_single, complete.view(-1), own),
        "all-to-all": partial(dist.all_to_all_single, other, complete),
        "reduce-scatter, pairwise": partial(reduce_scatter_pairwise, complete, world.levels),
        "all-gather, in place": partial(all_gather_in_place, complete, world.all_ranks),
    }


def run_once(name: str, world: World) -> dict[str, list[list[int | None]]]:
    """Run a collective in which chunk c of rank r is 10 (r + 1) + c + 1. Collective.

    Returns:
        The chunks of every rank before and after it; None where a rank has no memory for a chunk.
    """
    before, after, _ = COLLECTIVES[name]
    values = 10.0 * (world.rank + 1) + 1 + torch.arange(world.size, device=world.device)
    complete, other = values.clone()[:, None], torch.zeros(world.size, 1, device=world.device)
    if before == "own":
        complete, other = torch.zeros_like(complete), values[world.rank].expand(world.size, 1).clone()

    def content(extent: str, tensor: torch.Tensor) -> list[int | None]:
        if extent == "own":
            return [int(other[0]) if chunk == world.rank else None for chunk in range(world.size)]
        holds = extent == "all" or world.is_main_process
        return [int(value) if holds else None for value in tensor]

    first = content(before, complete)
    calls_on(complete, other, world)[name]()
    wait_for_device(world)
    last = content(after, other if name == "all-to-all" else complete)
    sides = zip(*all_gather_object((first, last), world), strict=True)
    return dict(zip(("before", "after"), map(list, sides), strict=True))


def collectives(lab: Lab) -> None:
    """Collectives

    Each collective really ran on small tensors, in which chunk c of rank r starts as 10 (r + 1) + c + 1; then it was
    timed. docs/communication.md#collectives explains the pictures, times and bandwidths.
    """
    world, n = lab.world, lab.world.size
    sizes = sizes_up_to(lab.largest, n)
    pictures = {name: run_once(name, world) for name in COLLECTIVES}
    for name, sides in pictures.items():
        rows = [["·" if chunk is None else chunk for chunk in (*a, *b)] for a, b in zip(*sides.values(), strict=True)]
        header = [text for side in sides for text in (side, *[""] * (n - 1))]
        lab.page.table(name, pd.DataFrame(rows, [f"rank {rank}" for rank in range(n)], header))
    # Written to, because the system would map all pages of memory that has only been read to a single one. Zeros stay
    # zeros however often they are summed.
    complete, other = (torch.empty(sizes[-1] // ELEMENT, device=world.device).fill_(0) for _ in range(2))
    calls: dict[Any, Callable[[], object]] = {}
    for size in sizes:
        rows_a, rows_b = (tensor[: size // ELEMENT].view(n, -1) for tensor in (complete, other))
        calls |= {(name, size): call for name, call in calls_on(rows_a, rows_b, world).items()}
    times = lab.times(calls)
    medians = times.median().unstack(0)[list(times.columns.unique(0))].rename_axis("bytes")
    lab.page.chart("Time by size", medians, "seconds", log=True)
    lab.page.table("Median times, ms", (1e3 * medians).rename(format_size).T.map("{:.3g}".format))
    factors = [COLLECTIVES[str(name).partition(",")[0]][2](n) for name in medians]
    bandwidths = medians.rdiv(medians.index.to_series(), axis=0) * factors / 1e9
    lab.page.table("Bus bandwidths, GB/s", bandwidths.rename(format_size).T.map("{:.3g}".format))
    lab.page.numbers |= {"pictures": pictures, "seconds": {str(key): column.tolist() for key, column in times.items()}}


def sizes_up_to(largest: int, ranks: int) -> list[int]:
    """Return sizes in bytes from 1 KiB up, each rounded up to the same number of elements per rank."""
    one_each = ranks * ELEMENT
    powers = (2**10 * 4**exponent for exponent in range(20))
    return sorted({-(-size // one_each) * one_each for size in (*powers, largest) if size <= largest})
