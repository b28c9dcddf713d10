"""The section of the laboratory on one exchange in pieces: figure 2 (a, b) of Li et al. 2020."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from markupsafe import Markup
from matplotlib.figure import Figure as Canvas

from ...common.charts import SERIES_COLORS, render_svg
from ...common.formats import format_size
from ...distributed.world import World
from ..charts import format_seconds, limits_of, use_logarithmic_axes
from ..page import Figure, Section, Table
from ..rounds import ratios, time_calls

ELEMENTS = 60_000_000  # as in the paper
PIECES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)  # elements; and all of them at once
MOST_PIECES = 2_000  # that are exchanged: gloo takes a minute for 60,000
ELEMENT = 4  # bytes of an fp32 number
TITLE = "One exchange in pieces"
ABOUT = (
    "{n:,} numbers in pieces, each of which is an asynchronous all-reduce; the time until all have finished, in "
    f"proportion to that of {MOST_PIECES:,} if there are more: "
    "docs/communication.md#granularity."
)


def all_reduce_in_pieces(tensor: torch.Tensor, piece: int) -> None:
    """Start an all-reduce of each piece, and wait for all of them. Collective."""
    handles = [dist.all_reduce(part, async_op=True) for part in tensor.split(piece)]
    for handle in handles:
        assert handle is not None
        handle.wait()


def measure_granularity(largest: int, *, seconds: float, world: World, disable_tqdm: bool) -> Section:
    """Time the exchange with pieces of each size, for about `seconds` each. Collective.

    Args:
        largest: bytes of the largest tensor.
    """
    n = min(ELEMENTS, largest // ELEMENT)
    tensor = torch.zeros(n, device=world.device)
    sizes = [*(piece for piece in PIECES if piece < n), n]
    calls: dict[int, Callable[[], object]] = {
        size: partial(all_reduce_in_pieces, tensor[: MOST_PIECES * size], size) for size in sizes
    }
    measured_times = time_calls(calls, seconds, world, disable_tqdm=disable_tqdm)
    times = {
        size: [time * n / min(n, MOST_PIECES * size) for time in rounds] for size, rounds in measured_times.items()
    }
    rows = []
    for size, measured in times.items():
        relative = [f"{number:.3f}" for number in ratios(measured, times[n])]
        total = format_seconds(statistics.median(measured))
        rows.append([f"{size:,}", format_size(size * ELEMENT), f"{-(-n // size):,}", total, *relative])
    table = Table(TITLE, ["numbers per piece", "bytes", "pieces", "time", "relative", "lowest", "highest"], rows)
    medians = {size * ELEMENT: statistics.median(measured) for size, measured in times.items()}
    chart = [Figure(TITLE, granularity_chart(medians))] if world.is_main_process else []
    data = {"elements": n, "seconds": {str(size): measured for size, measured in times.items()}}
    return Section("granularity", TITLE, [ABOUT.format(n=n)], [*chart, table], data)


def granularity_chart(medians: dict[int, float]) -> Markup:
    def draw(canvas: Canvas) -> None:
        axes = canvas.add_subplot(xlabel="size of a piece", ylabel="time of all pieces")
        axes.plot(list(medians), list(medians.values()), "o-", color=SERIES_COLORS[0], markersize=6)
        use_logarithmic_axes(axes, limits_of(list(medians.values())), format_seconds)

    return render_svg(300, "Time of an exchange over the size of its pieces", draw)
