"""The eight collectives: what each one does, as a call and as a picture of every rank's memory before and after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from ...distributed.collectives import (
    all_gather_in_place,
    all_gather_object,
    all_gather_single,
    reduce_scatter_single,
    wait_for_device,
)
from ...distributed.world import World
from ...strategies.reduction import reduce_scatter_pairwise
from ..page import Chunk, Picture

MOST_PICTURED = 8  # ranks; more columns would not fit into a terminal

Extent = Literal["complete", "chunk", "on rank 0"]  # all chunks, the rank's own one, all of them on rank 0 only
Content = list[tuple[int, int] | None]  # of one rank: the value and the origin of each chunk, or None


@dataclass(frozen=True)
class PicturedCollective:
    """A collective operation. docs/communication.md#collectives says where each is used."""

    name: str
    before: Extent  # what a rank passes
    after: Extent  # what a rank has at the end
    note: str


COLLECTIVES = (
    PicturedCollective("scatter", "on rank 0", "chunk", "Rank 0 sends the r-th chunk of its tensor to rank r."),
    PicturedCollective("gather", "chunk", "on rank 0", "Rank 0 receives the chunks of all ranks."),
    PicturedCollective("reduce", "complete", "complete", "Rank 0 receives the sum; other ranks, undefined data."),
    PicturedCollective("broadcast", "complete", "complete", "Every rank receives the tensor of rank 0."),
    PicturedCollective("all-reduce", "complete", "complete", "Every rank receives the sum."),
    PicturedCollective("reduce-scatter", "complete", "chunk", "Rank r receives the r-th chunk of the sum."),
    PicturedCollective("all-gather", "chunk", "complete", "Every rank receives the chunks of all ranks."),
    PicturedCollective("all-to-all", "complete", "complete", "Rank r receives the r-th chunk of every rank."),
)

# What the strategies here call instead of the collective that is named up to the comma.
VARIANTS = ("reduce-scatter, pairwise", "all-gather, in place")


def prepare(
    name: str, complete: torch.Tensor, other: torch.Tensor, *, world: World, group: dist.ProcessGroup | None = None
) -> Callable[[], object]:
    """Return a function that runs one of `COLLECTIVES` or `VARIANTS`. Every rank has to call it.

    Args:
        complete: shape (number of ranks, n): the tensor of all chunks. An all-to-all reads it, and writes into `other`.
        other: the same shape. Its first row is this rank's chunk, if the collective reads or writes a single one.
        group: the ranks that take part, with the same numbers; None: all.
    """
    chunk, chunks = other[0], list(complete) if world.is_main_process else None
    match name:
        case "scatter":
            return partial(dist.scatter, chunk, chunks, src=0, group=group)
        case "gather":
            return partial(dist.gather, chunk, chunks, dst=0, group=group)
        case "reduce":
            return partial(dist.reduce, complete, dst=0, group=group)
        case "broadcast":
            return partial(dist.broadcast, complete, src=0, group=group)
        case "all-reduce":
            return partial(dist.all_reduce, complete, group=group)
        case "reduce-scatter":
            return partial(reduce_scatter_single, chunk, complete.view(-1), group=group)
        case "all-gather":
            return partial(all_gather_single, complete.view(-1), chunk, group=group)
        case "all-to-all":
            return partial(dist.all_to_all_single, other, complete, group=group)
        case "all-gather, in place":
            return partial(all_gather_in_place, complete, world.all_ranks)
        case "reduce-scatter, pairwise":
            return partial(reduce_scatter_pairwise, complete, world.levels)
    raise ValueError(f"no collective is called {name}")


# ---- pictures --------------------------------------------------------------------------------------------------------


def take_pictures(world: World) -> list[Picture]:
    """Run each collective on small tensors, and return what every rank held before and after it. Collective.

    With more than `MOST_PICTURED` ranks, only the first ones take part.
    """
    size = min(world.size, MOST_PICTURED)
    group = dist.new_group(list(range(size))) if size < world.size else None
    pictures = []
    for collective in COLLECTIVES:
        content_here = run_once(collective, size, world, group=group) if world.rank < size else None
        contents = [content for content in all_gather_object(content_here, world) if content is not None]
        before, after = ([[as_chunk(cell) for cell in content[side]] for content in contents] for side in (0, 1))
        pictures.append(Picture(collective.name, collective.note, before, after))
    if group is not None:
        dist.destroy_process_group(group)
    return pictures


def run_once(
    collective: PicturedCollective, size: int, world: World, *, group: dist.ProcessGroup | None
) -> tuple[Content, Content]:
    """Run a collective and return the content of this rank's memory before and after it.

    Each chunk has two numbers. The first one is the value that is shown: chunk 3 of rank 1 is 24. The second one tells
    where the chunk comes from: rank r sets bit r, so a sum has the bits of all ranks that it contains.
    """
    columns = torch.arange(size)
    values = torch.stack([10 * (world.rank + 1) + columns + 1, torch.full_like(columns, 1 << world.rank)], dim=1)
    values = values.to(world.device, torch.float32)
    complete, other = values.clone(), torch.zeros_like(values)
    if collective.before == "chunk":
        complete, other = torch.zeros_like(values), values[world.rank].repeat(size, 1)
    before = _content(collective.before, complete, other, world=world)
    prepare(collective.name, complete, other, world=world, group=group)()
    wait_for_device(world)
    received = other if collective.name == "all-to-all" else complete
    return before, _content(collective.after, received, other, world=world)


def _content(extent: Extent, complete: torch.Tensor, other: torch.Tensor, *, world: World) -> Content:
    """Return the value and the origin of each chunk in this rank's memory."""
    content: Content = [None] * len(complete)
    if extent == "chunk":
        value, origin = other[0].int().tolist()
        content[world.rank] = (value, origin)
    elif extent == "complete" or world.is_main_process:
        content = [(value, origin) for value, origin in complete.int().tolist()]
    return content


def as_chunk(cell: tuple[int, int] | None) -> Chunk | None:
    if cell is None:
        return None
    value, origin = cell
    return Chunk(str(value), [rank for rank in range(origin.bit_length()) if origin >> rank & 1])
