"""Sections on messages: what each collective does to every rank's memory, and how long it takes by its size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from scipy.optimize import curve_fit

from ..common.errors import UserError
from ..common.formats import MIB, format_size
from ..distributed.collectives import (
    all_gather_in_place,
    all_gather_object,
    all_gather_single,
    raise_on_all_ranks,
    reduce_scatter_single,
    wait_for_device,
)
from ..distributed.world import World
from ..strategies.reduction import reduce_scatter_pairwise
from .core import Lab, compared
from .flags import STEP_SECONDS

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
ELEMENTS = 60_000_000  # of the exchange in pieces, as in the paper
PIECES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)  # elements; and all of them at once
MOST_PIECES = 2_000  # that are exchanged: gloo takes a minute for 60,000
MOST_PEERS = 7  # whose messages are timed


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
    timed. docs/communication.md#collectives explains the pictures, times, bandwidths and fits.
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
    medians = show_by_size(lab, lab.times(calls))
    factors = [COLLECTIVES[str(name).partition(",")[0]][2](n) for name in medians]
    bandwidths = medians.rdiv(medians.index.to_series(), axis=0) * factors / 1e9
    if n > 1:
        lab.page.chart("Bus bandwidth", bandwidths, "GB/s", log=True)
    lab.page.table("Bus bandwidths, GB/s", bandwidths.rename(format_size).T.map("{:.3g}".format))
    lab.page.numbers["pictures"] = pictures


def point_to_point(lab: Lab) -> None:
    """Messages between two ranks

    Rank 0 sends a tensor to another rank, which sends it back: half of the time is that of a message.
    docs/communication.md#messages-and-operations says how it differs from a collective's.
    """
    with raise_on_all_ranks(lab.world):
        if lab.world.size == 1:
            raise UserError("--sections point_to_point: a message needs two ranks: start more")
    sizes, rank = sizes_up_to(lab.largest, 1), lab.world.rank
    tensor = torch.zeros(sizes[-1] // ELEMENT, device=lab.world.device)

    def send_and_return(part: torch.Tensor, peer: int) -> None:
        for source, target in ((0, peer), (peer, 0)):
            if rank == source:
                dist.send(part, dst=target)
            elif rank == target:
                dist.recv(part, src=source)

    calls: dict[Any, Callable[[], object]] = {
        (f"0 and {peer}", size): partial(send_and_return, tensor[: size // ELEMENT], peer)
        for peer in range(1, min(lab.world.size, MOST_PEERS + 1))
        for size in sizes
    }
    show_by_size(lab, lab.times(calls) / 2)


def operations(lab: Lab) -> None:
    """Operations of a reduction

    An all-reduce of a bucket of 25 MiB with each operation. docs/communication.md#messages-and-operations says which
    operations the backends have.
    """
    zeros = torch.zeros(min(25 * MIB, lab.largest) // ELEMENT, device=lab.world.device)  # they stay zeros

    def reduce_with(name: str) -> None:
        if name == "avg" and dist.get_backend() != "nccl":  # gloo has no average
            dist.all_reduce(zeros)
            zeros.div_(lab.world.size)
        else:
            dist.all_reduce(zeros, op=getattr(dist.ReduceOp, name.upper()))

    names = ("sum", "avg", "product", "min", "max")
    times = lab.times({name: partial(reduce_with, name) for name in names}, STEP_SECONDS)
    lab.page.table(f"All-reduce of {format_size(zeros.nbytes)}", compared(times, "all-reduce"))
    lab.page.numbers["seconds"] = times.to_dict("list")


def granularity(lab: Lab) -> None:
    """One exchange in pieces

    60 million numbers, or --largest_mib, in pieces, each of which is an asynchronous all-reduce; the time until all
    have finished, in proportion to that of 2,000 if there are more: docs/communication.md#granularity.
    """
    tensor = torch.zeros(min(ELEMENTS, lab.largest // ELEMENT), device=lab.world.device)
    n = len(tensor)

    def exchange(piece: int) -> None:
        works = [dist.all_reduce(part, async_op=True) for part in tensor[: MOST_PIECES * piece].split(piece)]
        for work in works:
            work.wait()

    sizes = [n, *(piece for piece in PIECES[::-1] if piece < n)]
    times = lab.times({size: partial(exchange, size) for size in sizes}, STEP_SECONDS)
    times *= [n / min(n, MOST_PIECES * size) for size in sizes]
    frame = compared(times, "exchange")
    frame.insert(0, "pieces", [f"{-(-n // size):,}" for size in sizes])
    lab.page.table("One exchange in pieces", frame.rename(index="{:,}".format).rename_axis("numbers per piece"))
    by_bytes = pd.DataFrame({"all-reduces": times.median()}).rename(lambda size: size * ELEMENT).rename_axis("bytes")
    lab.page.chart("One exchange over the size of its pieces", by_bytes, "seconds", log=True)
    lab.page.numbers |= {"elements": n, "seconds": times.to_dict("list")}


# ---- times by size ---------------------------------------------------------------------------------------------------


class AlphaBeta(NamedTuple):
    """A fitted line, seconds = alpha + beta * bytes (docs/communication.md#the-α-β-model)."""

    alpha: float  # latency in seconds
    beta: float  # seconds per byte
    alpha_error: float  # standard errors
    beta_error: float
    relative_error: float  # median of |fitted / measured - 1| over the points


def fit_alpha_beta(sizes: ArrayLike, seconds: ArrayLike) -> AlphaBeta:
    """Fit α and β, neither of them negative, to measured times.

    Minimizes the sum of squared *relative* errors. The sizes span many orders of magnitude, so absolute errors would
    leave α undetermined: the largest message's noise alone is longer than the latency.
    """
    mb, us = (
        np.asarray(sizes) / 1e6,
        np.asarray(seconds) * 1e6,
    )  # numbers around 1: otherwise the fit is ill-conditioned
    start = us.min(), us[-1] / mb[-1]
    line = lambda x, a, b: a + b * x  # noqa: E731
    (a, b), covariance = curve_fit(line, mb, us, p0=start, sigma=us, bounds=(0, np.inf))
    a_error, b_error = np.sqrt(np.diag(covariance))
    error = float(np.median(np.abs((a + b * mb) / us - 1)))
    return AlphaBeta(a / 1e6, b / 1e12, a_error / 1e6, b_error / 1e12, error)


def sizes_up_to(largest: int, ranks: int) -> list[int]:
    """Return sizes in bytes from 1 KiB up, each rounded up to the same number of elements per rank."""
    one_each = ranks * ELEMENT
    powers = (2**10 * 4**exponent for exponent in range(20))
    return sorted({-(-size // one_each) * one_each for size in (*powers, largest) if size <= largest})


def show_by_size(lab: Lab, times: pd.DataFrame) -> pd.DataFrame:
    """Show times, whose columns are (name, bytes), and the line that fits each name. Returns the medians by size."""
    medians = times.median().unstack(0)[list(times.columns.unique(0))].rename_axis("bytes")
    lab.page.chart("Time by size", medians, "seconds", log=True)
    lab.page.table("Median times, ms", (1e3 * medians).rename(format_size).T.map("{:.3g}".format))
    rows = {}
    for name, column in medians.items():
        fit = fit_alpha_beta(column.index, column)
        bandwidth = "–"  # the times do not tell whether bytes take any
        if fit.beta > fit.beta_error:
            bandwidth = f"{1e-9 / fit.beta:.3g} ± {1e-9 * fit.beta_error / fit.beta**2:.2g}"
        alpha = f"{1e6 * fit.alpha:.1f} ± {1e6 * fit.alpha_error:.1f}"
        largest = column.index[-1] / column.iloc[-1] / 1e9
        rows[name] = [alpha, bandwidth, f"{fit.relative_error:.0%}", f"{largest:.3g}"]
        points = [{"bytes": size, "seconds": times[name, size].tolist()} for size in medians.index]
        lab.page.numbers.setdefault("times", {})[name] = {"fit": fit._asdict(), "points": points}
    header = ["α, µs", "1/β, GB/s", "median error", f"GB/s with {format_size(medians.index[-1])}"]
    note = "± is the standard error. 1 GB = 1e9 B."
    lab.page.table("α-β fits", pd.DataFrame.from_dict(rows, orient="index", columns=header), note)
    return medians
