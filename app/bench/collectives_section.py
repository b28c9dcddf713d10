"""The section of the laboratory on collectives: pictures, times from 1 KiB up, bandwidths and α-β fits."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import psutil
import torch

from app.bench.alpha_beta import AlphaBeta, bus_bandwidth_factor, fit_alpha_beta
from app.bench.charts import bandwidth_by_size, format_seconds, format_size, time_by_size
from app.bench.collectives import COLLECTIVES, VARIANTS, prepare, take_pictures
from app.bench.page import Figure, Part, Section, Table
from app.bench.timing import time_calls
from app.distributed.collectives import all_gather_object
from app.distributed.world import World
from app.settings import Settings

SMALLEST, STEP = 2**10, 4  # bytes, and the ratio of one size to the next
ELEMENT = 4  # bytes of an fp32 number
# What a rank holds at once, in complete tensors: two of its own, and what gloo copies a gathered or reduced one into.
TENSORS_PER_RANK = 3
USABLE = 0.8  # share of the free memory

ABOUT_PICTURES = (
    "Each collective below really ran on small tensors: the numbers are what every rank held before and after it. "
    "Chunk c of rank r starts as 10 (r + 1) + c + 1, so 23 is the third chunk of rank 1. A dot is a chunk for which "
    "a rank has no memory. On the page, the color of a cell shows the rank that its data comes from, and a sum has "
    "the colors of all ranks that it contains."
)
ABOUT_TIMES = (
    "The size is that of the complete tensor, as in nccl-tests: for an all-gather what each rank has at the end, for "
    "a scatter what rank 0 has. A time is the median over rounds, on the slowest rank; the calls of a round start "
    "one after another. The line is the α-β model, seconds = α + β x bytes, fitted to relative errors; the band is "
    "the 95% interval in which it expects a further measurement. Algorithm bandwidth is size / time. Bus bandwidth "
    "multiplies it by what each link has to carry at least, 2 (N - 1) / N for an all-reduce among N ranks, and is "
    "comparable across collectives and numbers of ranks."
)

Points = dict[str, list[tuple[int, list[float]]]]  # by collective: (bytes, seconds in each round)


def measure_collectives(settings: Settings, world: World, largest: int, seconds_per_point: float) -> Section:
    """Show and time all collectives. Collective.

    Args:
        largest: the largest tensor in bytes.
        seconds_per_point: about how long to time each collective with each size.
    """
    pictures = take_pictures(world)
    fitting = min(largest, largest_that_fits(world))
    sizes = sizes_up_to(fitting, world.size)
    points = time_collectives(sizes, seconds_per_point, settings, world)
    medians = {name: [(n, statistics.median(taken)) for n, taken in found] for name, found in points.items()}
    fits = {name: fit_alpha_beta(*zip(*found, strict=True)) for name, found in medians.items()}
    parts: list[Part] = []
    for picture in pictures:
        parts.append(picture)
        if world.is_main_process:  # only it writes the page
            parts.append(time_figure(picture.title, medians[picture.title], fits[picture.title]))
    if world.is_main_process and world.size > 1:
        bandwidths = {name: bus_bandwidths(name, found, world) for name, found in medians.items()}
        parts.append(Figure("Bus bandwidth", bandwidth_by_size(bandwidths)))
    parts += [fit_table(medians, fits, world), time_table(medians)]
    paragraphs = [ABOUT_PICTURES, ABOUT_TIMES]
    paragraphs += [f"{name}: {reason}." for name, reason in VARIANTS.items()]
    if fitting < largest:
        paragraphs.append(
            f"Tensors of more than {format_size(fitting)} were skipped: each rank holds up to {TENSORS_PER_RANK} of "
            f"them at once, which do not fit into the free memory."
        )
    if world.size == 1:
        paragraphs.append("With one rank nothing is sent: the times are those of the calls and of local copies.")
    return Section("collectives", "Collectives", paragraphs, parts, as_data(points, fits, world))


def as_data(points: Points, fits: Mapping[str, AlphaBeta], world: World) -> dict[str, object]:
    """Return all numbers for JSON."""
    return {
        name: {
            "fit": asdict(fits[name]),
            "bus_bandwidth_factor": bus_bandwidth_factor(name.partition(",")[0], world.size),
            "points": [{"bytes": size, "seconds": taken} for size, taken in found],
        }
        for name, found in points.items()
    }


# ---- measuring -------------------------------------------------------------------------------------------------------


def largest_that_fits(world: World) -> int:
    """Return the largest tensor, in bytes, for which every rank has memory. Collective."""
    if world.device.type == "cuda":
        free = torch.cuda.mem_get_info(world.device)[0]
    else:
        free = psutil.virtual_memory().available // world.local_size
    return int(min(all_gather_object(free, world)) * USABLE / TENSORS_PER_RANK)


def sizes_up_to(largest: int, ranks: int) -> list[int]:
    """Return sizes in bytes, from `SMALLEST` up to `largest`, each a multiple of one element per rank."""
    sizes = []
    size = SMALLEST
    while size < largest:
        sizes.append(size)
        size *= STEP
    chunk = ranks * ELEMENT
    return [max(chunk, size // chunk * chunk) for size in (*sizes, largest)]


def time_collectives(sizes: Sequence[int], seconds_per_point: float, settings: Settings, world: World) -> Points:
    """Time every collective with every size. Collective."""
    complete, other = (_allocate(sizes[-1], world) for _ in range(2))
    calls: dict[tuple[str, int], Callable[[], object]] = {}
    for size in sizes:
        views = (tensor[: size // ELEMENT].view(world.size, -1) for tensor in (complete, other))
        rows, received = views
        for name in (*(collective.name for collective in COLLECTIVES), *VARIANTS):
            calls[name, size] = prepare(name, rows, received, world)
    taken = time_calls(calls, seconds_per_point, world, settings.disable_tqdm)
    points: Points = {}
    for (name, size), seconds in taken.items():
        points.setdefault(name, []).append((size, seconds))
    return points


def _allocate(size: int, world: World) -> torch.Tensor:
    # Written to, because the system would map all pages of memory that has only been read to a single one. Zeros stay
    # zeros however often they are summed.
    return torch.empty(size // ELEMENT, device=world.device).fill_(0)


# ---- results ---------------------------------------------------------------------------------------------------------


def bus_bandwidths(name: str, medians: Sequence[tuple[int, float]], world: World) -> list[tuple[float, float]]:
    """Return (size, bytes per second) of a collective or of a variant, which is called like it up to a comma."""
    factor = bus_bandwidth_factor(name.partition(",")[0], world.size)
    return [(size, factor * size / seconds) for size, seconds in medians]


def time_figure(name: str, medians: Sequence[tuple[int, float]], fit: AlphaBeta) -> Figure:
    """Return the chart of one collective."""
    sizes, seconds = zip(*medians, strict=True)
    line = f"α = {format_seconds(fit.alpha)}, 1/β = {gigabytes(1 / fit.beta) if fit.beta else 'unlimited'} GB/s"
    note = f"{line}; the line is off by {fit.relative_error:.0%} in the median."
    return Figure(f"{name}: time", time_by_size(name, sizes, seconds, fit), note)


def fit_table(medians: Mapping[str, Sequence[tuple[int, float]]], fits: Mapping[str, AlphaBeta], world: World) -> Table:
    """Return a table with the line that fits each collective, and its bandwidths with the largest tensor."""
    largest = next(iter(medians.values()))[-1][0]
    header = ("collective", "α, µs", "1/β, GB/s", "line is off by", f"algorithm, {format_size(largest)}", "bus, GB/s")
    rows = []
    for name, found in medians.items():
        fit, (size, seconds) = fits[name], found[-1]
        # The error of 1/β to first order.
        inverse = f"{gigabytes(1 / fit.beta)} ± {gigabytes(fit.beta_error / fit.beta**2)}" if fit.beta else "–"
        alpha = f"{1e6 * fit.alpha:.1f} ± {1e6 * fit.alpha_error:.1f}"
        algorithm, bus = size / seconds, bus_bandwidths(name, found, world)[-1][1]
        rows.append((name, alpha, inverse, f"{fit.relative_error:.0%}", gigabytes(algorithm), gigabytes(bus)))
    note = "± is the standard error. The bandwidths are those of the largest tensor, in GB/s (1e9 bytes per second)."
    return Table("α-β fits and bandwidths", header, rows, note)


def time_table(medians: Mapping[str, Sequence[tuple[int, float]]]) -> Table:
    """Return a table with one line per collective and one column per size."""
    sizes = [size for size, _ in next(iter(medians.values()))]
    rows = [(name, *(f"{1e3 * seconds:.3g}" for _, seconds in found)) for name, found in medians.items()]
    return Table("Median times, ms", ("collective", *map(format_size, sizes)), rows)


def gigabytes(value: float) -> str:
    """Return bytes or bytes per second in 1e9."""
    return f"{value / 1e9:.3g}"
