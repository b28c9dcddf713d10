"""The section of the laboratory on the size of the batch: tokens per second, and the memory that the plan predicts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import psutil
import torch
from markupsafe import Markup
from matplotlib.figure import Figure as Canvas

from ...common.charts import SERIES_COLORS, render_svg, use_powers_of_two
from ...common.errors import UserError
from ...common.formats import mib
from ...distributed.collectives import all_gather_object, raise_on_all_ranks
from ...distributed.world import World
from ...plan.report import largest_that_fits
from ...plan.step import build_plan
from ...settings import Settings
from ...training.build import ReviewData
from ..charts import format_seconds
from ..page import Figure, Section, Table
from ..steps import plain_ddp
from .step_variants import Variant, compare

ROWS = (4, 8, 16, 32, 64, 128)  # of a micro-batch, on each rank
TITLE = "Tokens per second over the size of the batch"
ABOUT = (
    "Steps of one micro-batch per rank. Each size has other rows, so compare tokens, which do not include padding. The "
    "memory is that of app.plan, with rows of --max_length, and so is the limit. "
    "docs/communication.md#the-size-of-the-batch."
)


@dataclass(frozen=True)
class Point:
    """Steps with one size of the batch."""

    seconds: float  # per step
    rows: int  # per step, on all ranks
    tokens: float  # the same, without padding
    memory: int  # bytes per rank, from the plan

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def batch_size_variants(settings: Settings, n_train: int, ranks: int) -> dict[str, Variant]:
    """Return steps with each number of rows per rank, as far as there are enough training rows."""
    plain = replace(plain_ddp(settings), gradient_accumulation_steps=1, per_device_train_batch_size=None)
    plain = replace(plain, logical_ranks=None)
    return {
        str(rows): Variant(replace(plain, train_batch_size=rows * ranks)) for rows in ROWS if rows * ranks <= n_train
    }


def measure_batch_size(settings: Settings, data: ReviewData, *, seconds: float, world: World) -> Section:
    """Time steps of several sizes, next to the memory that they need. Collective."""
    variants = batch_size_variants(settings, len(data.split.train), world.size)
    plan = build_plan(next(iter(variants.values())).settings, world.topology)
    base, count = plan.largest_memory("ddp").on_device(cpu_offload=False), partial(plan.count, strategy="ddp")
    free = memory_per_rank(world)
    limit = largest_that_fits(free - base, count)
    variants = {rows: variant for rows, variant in variants.items() if int(rows) <= limit}
    with raise_on_all_ranks(world):
        if not variants:
            raise UserError(f"section batch_size: no batch fits into {mib(free)} MiB per rank")
    compared = compare(settings.model, variants, data, seconds=seconds, world=world, micro_batches=8)
    points = {}
    for rows in map(int, variants):
        median = statistics.median(compared.seconds[str(rows)])
        points[rows] = Point(median, rows * world.size, compared.tokens[str(rows)], base + count(rows).peak)
    first = next(iter(points.values()))
    table = Table(
        settings.model,
        ["rows per rank", "time per step", "rows per second", "tokens per second", "relative", "planned memory, MiB"],
        [
            [
                str(rows),
                format_seconds(point.seconds),
                f"{point.rows_per_second:.0f}",
                f"{point.tokens_per_second:,.0f}",
                f"{point.tokens_per_second / first.tokens_per_second:.2f}",
                mib(point.memory),
            ]
            for rows, point in points.items()
        ],
        f"The plan's limit for {mib(free)} MiB per rank: {limit:,} rows. Larger batches are not timed.",
    )
    parts = [Figure(TITLE, batch_size_chart(points))] if world.is_main_process else []
    data_of_points = {
        str(rows): {"seconds": compared.seconds[str(rows)], "tokens": point.tokens, "planned_bytes": point.memory}
        for rows, point in points.items()
    }
    content = {"points": data_of_points, "limit": limit, "bytes_per_rank": free}
    return Section("batch_size", TITLE, [ABOUT], [*parts, table], content)


def memory_per_rank(world: World) -> int:
    """Return the bytes of memory that each rank can use at most, on the node that has least. Collective."""
    if world.device.type == "cuda":
        memory = torch.cuda.get_device_properties(world.device).total_memory
    else:
        memory = psutil.virtual_memory().total // world.local_size
    return min(all_gather_object(memory, world))


def batch_size_chart(points: Mapping[int, Point]) -> Markup:
    def draw(canvas: Canvas) -> None:
        axes = canvas.add_subplot(xlabel="rows per rank", ylabel="tokens per second")
        axes.plot(list(points), [point.tokens_per_second for point in points.values()], "o-", color=SERIES_COLORS[0])
        use_powers_of_two(axes, 2, "{:,.0f}".format)
        axes.set_ylim(bottom=0)

    return render_svg(300, TITLE, draw)
