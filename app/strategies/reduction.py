"""Sum gradients over logical ranks in a fixed order, so that the sum has the same bits at every number of processes.

Floating-point addition is not associative: an all-reduce over 2, 4 or 8 processes rounds differently. Here the
gradients of the V logical ranks are always added as one binary tree over neighbors, for V = 4: `(g0 + g1) + (g2 + g3)`.
A process that works for several logical ranks adds their gradients first (`TreeSum`), and the processes add their
results along the rest of the same tree (`sum_pairwise`). The idea is EasyScale's (Li et al., SC'23).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ..distributed.collectives import all_gather_in_place, all_gather_single
from ..distributed.world import RankGroup

Gradients = list[torch.Tensor]
Levels = Sequence[RankGroup]  # of `World.levels`
DONE = object()  # what is left of an exchange whose collectives are done


class TreeSum:
    """Sum gradients that become available one logical rank after another, as a binary tree.

    This is a binary counter: a new leaf is added to the sum of the leaf before it, the result to the sum of the two
    leaves before that, and so on. At most log2(n) partial sums are kept at a time.
    """

    def __init__(self) -> None:
        self.partial_sums: list[tuple[int, Gradients]] = []  # (level in the tree, sum), the lowest level last

    def add(self, leaf: Gradients) -> None:
        """Add the gradients of the next logical rank, one tensor per parameter. They may be overwritten."""
        level = 0
        while self.partial_sums and self.partial_sums[-1][0] == level:
            _, left = self.partial_sums.pop()
            torch._foreach_add_(left, leaf)
            leaf, level = left, level + 1
        self.partial_sums.append((level, leaf))

    def add_to_last_leaf(self, leaf: Sequence[torch.Tensor], indices: Sequence[int]) -> None:
        """Add all partial sums to gradients of the last logical rank, in place, in the order of the tree.

        `indices` are the positions of their parameters in the lists that were passed to `add`.
        """
        for _, partial_sum in reversed(self.partial_sums):
            torch._foreach_add_(list(leaf), [partial_sum[i] for i in indices])

    def clear(self) -> None:
        self.partial_sums.clear()


def sum_pairwise(parts: torch.Tensor) -> torch.Tensor:
    """Sum the rows of a tensor of shape (n, …) as a binary tree over neighbors. Overwrites `parts`.

    An unpaired last row is carried to the next level of the tree.
    """
    while len(parts) > 1:
        paired = len(parts) // 2 * 2
        parts[0:paired:2] += parts[1:paired:2]
        parts = parts[0::2]
    return parts[0]


def reduce_scatter_pairwise(chunks: torch.Tensor, levels: Levels) -> torch.Tensor:
    """Sum row r of every rank's `chunks` on rank r, in the order of the tree. Overwrites `chunks`. Collective.

    Sends the same number of bytes as a ring reduce-scatter, but all of them directly to a rank that adds them.

    Args:
        chunks: shape (number of ranks, n). The result has the shape (n,).
    """
    if len(levels) == 1:
        part, received = chunks.view(-1), torch.empty_like(chunks).view(-1)
    else:
        # A rank of a node adds its node's rows for all ranks with the same local rank: these rows must be neighbors.
        inside, between = levels
        part = chunks.view(between.size, inside.size, -1).transpose(0, 1).flatten()
        received = chunks.view(-1)
    for level in levels:
        rows = rows_for(received, level)
        dist.all_to_all_single(rows, rows_for(part, level), group=level.group)
        # The sum is in rows[0]. The last row is no longer needed, so the next level receives into it.
        part, received = sum_pairwise(rows), rows[-1]
    return part


def rows_for(tensor: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
    """Divide the elements of a tensor into one row for each rank of a group."""
    return tensor.view(ranks.size, len(tensor) // ranks.size)


def gradients_in(bucket: GradBucket, buffer: torch.Tensor) -> Gradients:
    """Return views of the gradients of a bucket's parameters in its buffer, or in a copy of it in another dtype.

    DDP lays a gradient out like its parameter. `bucket.gradients()` assumes that each of them is contiguous, which
    mixes up the elements of a parameter that is not, such as a transposed one.
    """
    views, start = [], 0
    for parameter in bucket.parameters():
        # DDP does the same: a parameter whose memory has gaps gets a contiguous gradient.
        is_dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
        flat = buffer[start : start + parameter.numel()]
        views.append(flat.as_strided(parameter.shape, parameter.stride()) if is_dense else flat.view(parameter.shape))
        start += parameter.numel()
    return views


def buckets_in_flight(levels: int, on_gpus: bool) -> int:
    """Return how many gradient buckets `FixedOrderAllReduce` receives at the same time, with 1 or 2 levels."""
    # On GPUs, one stream exchanges one bucket after another. On CPUs, each exchange starts its next collective when a
    # further bucket is ready: two for each level, and one more bucket for which the first collective starts.
    return 1 if on_gpus else 2 * levels + 1


class FixedOrderAllReduce:
    """A DDP communication hook that averages gradients over all logical ranks, in the order of the tree.

    With one or two processes it is DDP's own all-reduce, because a + b = b + a. Otherwise it is an all-to-all of
    chunks, the tree, and an all-gather: the same number of bytes as a ring all-reduce. Several nodes with two or more
    ranks each do that inside the nodes first, and then between ranks of equal local rank (`World.levels`), so that no
    more bytes leave a node than with a ring. The exchange of a bucket overlaps with the backward pass that computes the
    next ones.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], sums: TreeSum, *, levels: Levels, device: torch.device
    ) -> None:
        """Average the gradients of `parameters`, in the order of the lists that `TreeSum.add` gets."""
        self.index: dict[torch.Tensor, int] = {parameter: i for i, parameter in enumerate(parameters)}
        self.sums, self.levels, self.size = sums, levels, prod(level.size for level in levels)
        # For app.fixed_tree: a number to divide by, besides that of the ranks, and how many backward passes exchanged.
        self.divisor, self.exchanges = 1, 0
        self.in_flight: list[Exchange] = []
        self.free: list[torch.Tensor] = []  # what finished exchanges have received into
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def add(self, leaf: Gradients) -> None:
        """Add the gradients of one of this process's logical ranks other than the last one."""
        self.sums.add(leaf)

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start to average a bucket. DDP calls this in the backward pass, for the same buckets on every rank."""
        self.exchanges += bucket.is_last()
        self.add_partial_sums(bucket, bucket.buffer())
        if self.size <= 2:
            if self.divisor > 1:
                bucket.buffer().div_(self.divisor)
            return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: the default process group
        return self.exchange(bucket.buffer(), bucket.is_last(), divisor=self.size * self.divisor)

    def add_partial_sums(self, bucket: GradBucket, gradients: torch.Tensor) -> None:
        if self.sums.partial_sums:
            indices = [self.index[parameter] for parameter in bucket.parameters()]
            self.sums.add_to_last_leaf(gradients_in(bucket, gradients), indices)

    def exchange(self, buffer: torch.Tensor, is_last: bool, divisor: int) -> torch.futures.Future[torch.Tensor]:
        """Start to sum a buffer over three or more ranks, in place, and to divide the sum.

        `is_last` marks the last buffer of the backward pass.
        """
        devices: list[int | str | torch.device] = [] if self.stream is None else [buffer.device]
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        if self.stream is not None:  # on a stream of its own: neither the host nor the backward pass waits
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                for _ in sum_over_ranks(buffer, torch.empty_like(buffer), levels=self.levels, divisor=divisor):
                    pass
                future.set_result(buffer)
            return future
        # gloo runs collectives in the order in which they are started, which has to be the same on every rank. So an
        # exchange makes progress here, when the next ones start, rather than in a callback.
        received = self._receive_buffer(buffer)
        collectives = sum_over_ranks(buffer, received, levels=self.levels, divisor=divisor)
        next(collectives, None)
        self._advance()
        self.in_flight.append(Exchange(collectives, buffer, received, future))
        while is_last and self.in_flight:  # the backward pass has nothing left to compute, so nothing overlaps
            self._advance()
        return future

    def _advance(self) -> None:
        """Start the next collective of each exchange. Complete the exchanges that have none."""
        for exchange in self.in_flight[:]:
            if next(exchange.collectives, DONE) is DONE:
                exchange.future.set_result(exchange.buffer)
                # Buffers are used again, because the system clears new memory page by page, slowly.
                self.free.append(exchange.received)
                self.in_flight.remove(exchange)

    def _receive_buffer(self, like: torch.Tensor) -> torch.Tensor:
        for i, buffer in enumerate(self.free):
            if len(buffer) >= len(like) and buffer.dtype == like.dtype:
                return self.free.pop(i)
        return torch.empty_like(like)


class Exchange(NamedTuple):
    """A buffer that is being summed over the ranks."""

    collectives: Iterator[None]  # from `sum_over_ranks`
    buffer: torch.Tensor
    received: torch.Tensor
    future: torch.futures.Future[torch.Tensor]


def sum_over_ranks(buffer: torch.Tensor, received: torch.Tensor, *, levels: Levels, divisor: int) -> Iterator[None]:
    """Sum a buffer over the ranks and divide it, in place: an all-to-all and the tree in each level, then back.

    The buffer is divided into one chunk for each rank of the first level, which adds it, and in the second level the
    sum is divided again. The remaining elements, fewer than there are ranks, are sent to every rank, which adds them
    itself.

    Args:
        received: memory for the chunks of the other ranks, at least as large.

    Yields:
        When a collective has been started whose result the next one needs. On GPUs the host waits for none of them.
    """
    async_op, size = not buffer.is_cuda, prod(level.size for level in levels)
    divided = len(buffer) // size * size
    part = own_chunk = buffer[:divided]
    rest, received = buffer[divided:], received[:divided]
    rests = buffer.new_empty(size, len(rest))
    work: list[dist.Work | None] = []

    def wait() -> None:
        for started in work:
            if started is not None:  # None: not asynchronous
                started.wait()
        work.clear()

    if len(rest):
        work.append(all_gather_single(rests.view(-1), rest, async_op=async_op))
    gathered = []
    for level in levels if divided else ():
        rows = rows_for(received, level)
        work.append(dist.all_to_all_single(rows, rows_for(part, level), group=level.group, async_op=async_op))
        yield
        wait()
        part, received = sum_pairwise(rows), rows[-1]  # as in reduce_scatter_pairwise
        gathered.append((rows_for(own_chunk, level), level))
        own_chunk = gathered[-1][0][level.rank]
    torch.div(part, divisor, out=own_chunk)
    for chunks, level in reversed(gathered):
        wait()
        work += all_gather_in_place(chunks, level, async_op)
        yield
    wait()
    if len(rest):
        torch.div(sum_pairwise(rests), divisor, out=rest)
