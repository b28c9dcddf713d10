"""Sections of the laboratory beside collectives: messages between two ranks, and the operations of a reduction."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial

import torch
import torch.distributed as dist

from ...common.errors import RunError, UserError
from ...common.formats import MIB, format_size, gigabytes
from ...distributed.collectives import wait_for_device
from ...distributed.world import World
from ..charts import format_seconds, limits_of, time_by_size
from ..page import Figure, Part, Section, Table
from ..rounds import ratios, time_calls
from .collectives_section import ELEMENT, describe_fits, fit_line, sizes_up_to, time_table

MOST_PEERS = 7  # whose messages are timed
BUCKET = 25 * MIB  # as one of DDP's
SUM, AVERAGE = "sum", "avg"
ABOUT_MESSAGES = (
    "Rank 0 sends a tensor to another rank, which sends it back: half of the time is that of a message. "
    "docs/communication.md#messages-and-operations says how it differs from a collective's."
)
ABOUT_OPERATIONS = (
    "An all-reduce of a bucket with each operation. The results are of a tensor in which rank 0 has 3, rank 1 has 2 "
    "and the others have 1. docs/communication.md#messages-and-operations says which operations the backends have."
)


def check_peers(ranks: int) -> None:
    """Raise `UserError` if there is no other rank."""
    if ranks == 1:
        raise UserError("a message needs two ranks: start more")


# ---- messages --------------------------------------------------------------------------------------------------------


def measure_messages(world: World, largest: int, *, seconds_per_point: float, disable_tqdm: bool) -> Section:
    """Time messages of up to `largest` bytes between rank 0 and each other rank. Collective."""
    peers = range(1, min(world.size, MOST_PEERS + 1))
    sizes = sizes_up_to(largest, 1)
    tensor = torch.zeros(sizes[-1] // ELEMENT, device=world.device)
    calls: dict[tuple[int, int], Callable[[], object]] = {
        (peer, size): partial(send_and_return, tensor[: size // ELEMENT], peer, rank=world.rank)
        for peer in peers
        for size in sizes
    }
    times = time_calls(calls, seconds_per_point, world, disable_tqdm=disable_tqdm)
    messages = {key: [both / 2 for both in rounds] for key, rounds in times.items()}
    lines = {
        f"0 and {peer}": fit_line(f"0 and {peer}", [(size, messages[peer, size]) for size in sizes]) for peer in peers
    }
    parts: list[Part] = []
    if world.is_main_process:
        shown = list(lines.values())
        limits = limits_of([seconds for line in shown for seconds in line.seconds])
        parts.append(Figure("Messages: time", time_by_size(shown, limits), describe_fits(shown)))
    rows = []
    for name, line in lines.items():
        fit, size, seconds = line.fit, line.sizes[-1], line.seconds[-1]
        bandwidth = gigabytes(1 / fit.beta) if fit.beta else "–"
        rows.append([name, f"{1e6 * fit.alpha:.1f}", bandwidth, f"{fit.relative_error:.0%}", gigabytes(size / seconds)])
    header = ["ranks", "α, µs", "1/β, GB/s", "median error", f"GB/s with {format_size(sizes[-1])}"]
    parts += [Table("α-β fits", header, rows), time_table(lines)]
    data = {
        name: {"fit": asdict(line.fit), "points": [{"bytes": s, "seconds": messages[peer, s]} for s in sizes]}
        for peer, (name, line) in zip(peers, lines.items(), strict=True)
    }
    return Section("point_to_point", "Messages between two ranks", [ABOUT_MESSAGES], parts, data)


def send_and_return(tensor: torch.Tensor, peer: int, *, rank: int) -> None:
    """Send a tensor from rank 0 to a peer and back. The other ranks do nothing."""
    if rank == 0:
        dist.send(tensor, dst=peer)
        dist.recv(tensor, src=peer)
    elif rank == peer:
        dist.recv(tensor, src=0)
        dist.send(tensor, dst=0)


# ---- operations ------------------------------------------------------------------------------------------------------


def measure_operations(world: World, largest: int, *, seconds: float, disable_tqdm: bool) -> Section:
    """Time all-reduces with different operations, for about `seconds` each. Collective.

    Raises:
        RunError: a result is wrong.
    """
    n = min(BUCKET, largest) // ELEMENT
    zeros = torch.zeros(n, device=world.device)  # zeros stay zeros however often they are reduced
    calls = {name: partial(reduce_with, name, zeros, world.size) for name in results_of(world.size)}
    times = time_calls(calls, seconds, world, disable_tqdm=disable_tqdm)
    rows = []
    found: dict[str, float] = {}
    for name, expected in results_of(world.size).items():
        value = torch.full((1,), value_of(world.rank), device=world.device)
        reduce_with(name, value, world.size)
        wait_for_device(world)
        found[name] = float(value)
        if not math.isclose(found[name], expected, rel_tol=1e-5):
            raise RunError(f"an all-reduce with {name} returned {found[name]:g}, not {expected:g}")
        relative = [f"{number:.3f}" for number in ratios(times[name], times[SUM])]
        label = f"{name}: sum, then divided" if name == AVERAGE and not has_average() else name
        rows.append([label, f"{found[name]:g}", format_seconds(statistics.median(times[name])), *relative])
    header = ["operation", "result", "time", "relative", "lowest", "highest"]
    table = Table(f"All-reduce of {format_size(n * ELEMENT)}", header, rows)
    data = {name: {"result": found[name], "seconds": times[name]} for name in found}
    return Section("operations", "Operations of a reduction", [ABOUT_OPERATIONS], [table], data)


def value_of(rank: int) -> float:
    """Return small different numbers, whose product is finite with any number of ranks."""
    return float(max(1, 3 - rank))


def results_of(ranks: int) -> Mapping[str, float]:
    """Return the result of each operation on the values of all ranks."""
    values = [value_of(rank) for rank in range(ranks)]
    return {
        SUM: sum(values),
        AVERAGE: sum(values) / ranks,
        "product": math.prod(values),
        "min": min(values),
        "max": max(values),
    }


def has_average() -> bool:
    """Tell whether the backend averages by itself. gloo only sums."""
    return dist.get_backend() == "nccl"


def reduce_with(name: str, tensor: torch.Tensor, ranks: int) -> None:
    """Reduce a tensor in place on all ranks, as a training loop would call it. Collective."""
    if name == AVERAGE and not has_average():
        dist.all_reduce(tensor)
        tensor /= ranks
    else:
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name.upper()))
