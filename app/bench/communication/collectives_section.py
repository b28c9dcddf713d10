"""The section of the laboratory on collectives: pictures, times from 1 KiB up, bandwidths and α-β fits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import psutil
import torch

from ...common.errors import AgreedError, UserError
from ...common.formats import format_bandwidth, format_size, gigabytes
from ...distributed.collectives import all_gather_object
from ...distributed.world import World
from ..alpha_beta import FEWEST_POINTS, bus_bandwidth_factor, fit_alpha_beta
from ..charts import Line, bandwidth_by_size, format_seconds, limits_of, time_by_size
from ..page import Chunk, Figure, Part, Picture, Section, Table
from ..rounds import time_calls
from .collectives import COLLECTIVES, MOST_PICTURED, VARIANTS, prepare, take_pictures

SMALLEST, STEP = 2**10, 4  # bytes, and the ratio of one size to the next
ELEMENT = 4  # bytes of an fp32 number
# What a rank holds at once, in complete tensors: two of its own, and what gloo copies a gathered or reduced one into.
TENSORS_PER_RANK = 3
USABLE = 0.8  # share of the free memory

ABOUT = (
    "Each collective really ran on small tensors, in which chunk c of rank r starts as 10 (r + 1) + c + 1; then it was "
    "timed. docs/communication.md#collectives explains the pictures, times, bandwidths and fits."
)
FIRST_RANKS = f"The pictures show the first {MOST_PICTURED} ranks; the other ranks take no part in these runs."

Points = dict[str, list[tuple[int, list[float]]]]  # by collective: (bytes, seconds in each round)


def measure_collectives(world: World, largest: int, *, seconds_per_point: float, disable_tqdm: bool) -> Section:
    """Show all collectives, and time them with tensors of up to `largest` bytes. Collective.

    Raises:
        AgreedError: the free memory is not enough for a fit.
    """
    sizes = sizes_up_to(largest, world.size)
    limit = largest_that_fits(world)
    fitting = [size for size in sizes if size <= limit]
    if len(fitting) < FEWEST_POINTS:
        raise AgreedError(f"the free memory is enough for {len(fitting)} sizes of tensors; a fit needs {FEWEST_POINTS}")
    pictures = take_pictures(world)
    points = time_collectives(fitting, seconds_per_point, world, disable_tqdm=disable_tqdm)
    lines = {name: fit_line(name, measured) for name, measured in points.items()}
    limits = limits_of([seconds for line in lines.values() for seconds in line.seconds])
    parts: list[Part] = []
    for picture in pictures:
        parts.append(picture)
        if world.is_main_process:  # the other ranks do not write the page
            # A variant is called like its collective up to a comma.
            shown = [line for name, line in lines.items() if name.partition(",")[0] == picture.title]
            parts.append(Figure(f"{picture.title}: time", time_by_size(shown, limits), describe_fits(shown)))
    if world.is_main_process and world.size > 1:
        parts.append(
            Figure("Bus bandwidth", bandwidth_by_size({n: bus_bandwidths(x, world.size) for n, x in lines.items()}))
        )
    parts += [fit_table(lines, world.size), time_table(lines)]
    paragraphs = [ABOUT]
    if world.size > MOST_PICTURED:
        paragraphs.append(FIRST_RANKS)
    if sizes[-1] > limit:
        skipped = ", ".join(format_size(size) for size in sizes if size > limit)
        paragraphs.append(
            f"Skipped: {skipped}. A rank holds up to {TENSORS_PER_RANK} tensors of this size at once, for which the "
            f"free memory is not enough."
        )
    if world.size == 1:
        paragraphs.append("With one rank nothing is sent: the times are those of the calls and of local copies.")
    return Section("collectives", "Collectives", paragraphs, parts, as_data(pictures, points, lines, ranks=world.size))


def as_data(
    pictures: Sequence[Picture], points: Points, lines: Mapping[str, Line], *, ranks: int
) -> dict[str, dict[str, object]]:
    return {
        "pictures": {
            picture.title: {"before": values(picture.before), "after": values(picture.after)} for picture in pictures
        },
        "times": {
            name: {
                "fit": asdict(lines[name].fit),
                "bus_bandwidth_factor": bus_factor(name, ranks),
                "points": [{"bytes": size, "seconds": seconds} for size, seconds in measured],
            }
            for name, measured in points.items()
        },
    }


# ---- measuring -------------------------------------------------------------------------------------------------------


def largest_that_fits(world: World) -> int:
    """Return the largest tensor, in bytes, for which every rank has memory. Collective."""
    if world.device.type == "cuda":
        free = torch.cuda.mem_get_info(world.device)[0]
    else:
        free = psutil.virtual_memory().available // world.local_size
    return int(min(all_gather_object(free, world)) * USABLE / TENSORS_PER_RANK)


def check_largest(largest: int, ranks: int) -> None:
    """Check that there are enough sizes for a fit, which many ranks round up to the same number.

    Raises:
        UserError: there are not.
    """
    if len(sizes_up_to(largest, ranks)) < FEWEST_POINTS:
        enough = math.ceil(100 * 16 * ranks * ELEMENT / 2**20) / 100  # three sizes, each 4 times the one before
        raise UserError(
            f"--largest_mib {largest / 2**20:g}: a fit needs {FEWEST_POINTS} sizes that can be divided among {ranks} "
            f"ranks: use {enough:.2f} or more"
        )


def sizes_up_to(largest: int, ranks: int) -> list[int]:
    """Return sizes in bytes, from `SMALLEST` to `largest`, each rounded up to the same number of elements per rank."""
    sizes = [largest]
    size = SMALLEST
    while size < largest:
        sizes.append(size)
        size *= STEP
    one_each = ranks * ELEMENT
    return sorted({math.ceil(size / one_each) * one_each for size in sizes})


def time_collectives(sizes: Sequence[int], seconds_per_point: float, world: World, *, disable_tqdm: bool) -> Points:
    """Time every collective with every size. Collective."""
    # Written to, because the system would map all pages of memory that has only been read to a single one. Zeros stay
    # zeros however often they are summed.
    complete, other = (torch.empty(sizes[-1] // ELEMENT, device=world.device).fill_(0) for _ in range(2))
    calls: dict[tuple[str, int], Callable[[], object]] = {}
    for size in sizes:
        rows, received = (tensor[: size // ELEMENT].view(world.size, -1) for tensor in (complete, other))
        for name in (*(collective.name for collective in COLLECTIVES), *VARIANTS):
            calls[name, size] = prepare(name, rows, received, world=world)
    times = time_calls(calls, seconds_per_point, world, disable_tqdm=disable_tqdm)
    points: Points = {}
    for (name, size), seconds in times.items():
        points.setdefault(name, []).append((size, seconds))
    return points


# ---- results ---------------------------------------------------------------------------------------------------------


def fit_line(name: str, points: Sequence[tuple[int, list[float]]]) -> Line:
    sizes = [float(size) for size, _ in points]
    medians = [statistics.median(seconds) for _, seconds in points]
    return Line(name, sizes, medians, fit_alpha_beta(sizes, medians))


def bus_factor(name: str, ranks: int) -> float:
    """Return the factor of a collective, or of a variant, which is called like it up to a comma."""
    return bus_bandwidth_factor(name.partition(",")[0], ranks)


def bus_bandwidths(line: Line, ranks: int) -> list[tuple[float, float]]:
    """Return (size, bytes per second) of each measured point."""
    factor = bus_factor(line.name, ranks)
    return [(size, factor * size / seconds) for size, seconds in zip(line.sizes, line.seconds, strict=True)]


def describe_fits(lines: Sequence[Line]) -> str:
    """Return α, β and the error of each line."""
    texts = []
    for line in lines:
        fit = line.fit
        name = f"{line.name}: " if len(lines) > 1 else ""
        texts.append(
            f"{name}α = {format_seconds(fit.alpha)}, 1/β = {format_bandwidth(fit.beta)}, median error "
            f"{fit.relative_error:.0%}."
        )
    return " ".join(texts)


def values(rows: Sequence[Sequence[Chunk | None]]) -> list[list[int | None]]:
    return [[None if cell is None else int(cell.text) for cell in row] for row in rows]


def fit_table(lines: Mapping[str, Line], ranks: int) -> Table:
    """Return a table with the line that fits each collective, and its bandwidths with the largest tensor."""
    rows = []
    for name, line in lines.items():
        fit, size, seconds = line.fit, line.sizes[-1], line.seconds[-1]
        # The error of 1/β to first order.
        inverse = f"{gigabytes(1 / fit.beta)} ± {gigabytes(fit.beta_error / fit.beta**2)}" if fit.beta else "–"
        alpha = f"{1e6 * fit.alpha:.1f} ± {1e6 * fit.alpha_error:.1f}"
        bus = gigabytes(bus_bandwidths(line, ranks)[-1][1])
        rows.append((name, alpha, inverse, f"{fit.relative_error:.0%}", gigabytes(size / seconds), bus))
    largest = format_size(next(iter(lines.values())).sizes[-1])
    note = (
        f"± is the standard error. The last two columns are algorithm and bus bandwidth with {largest} (1 GB = 1e9 B)."
    )
    return Table("α-β fits and bandwidths", ("", "α, µs", "1/β, GB/s", "median error", "GB/s", "bus GB/s"), rows, note)


def time_table(lines: Mapping[str, Line]) -> Table:
    """Return a table with one line per collective and one column per size."""
    sizes = next(iter(lines.values())).sizes
    rows = [(name, *(f"{1e3 * seconds:.3g}" for seconds in line.seconds)) for name, line in lines.items()]
    return Table("Median times, ms", ("", *map(format_size, sizes)), rows)
