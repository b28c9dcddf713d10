"""Check that the ranks of a job reach each other and train together, before a long run does.

Two processes on this machine:

    torchrun --standalone --nproc_per_node=2 -m app.check

Two machines with 8 GPUs each; on the second one --node_rank=1:

    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=8 --master_addr=10.0.0.1 --master_port=29500 -m app.check

Rank 0 prints a line for each rank, in rank order. Then each node connects to every other one, and all ranks call an
all-reduce and train two steps of a toy model with DDP. Ranks wait for each other for --ddp_timeout seconds, here by
default 30.

If nothing is printed within seconds, torchrun on some node does not reach node 0. On that node, this names the reason:

    python -m app.check --connect 10.0.0.1:29500
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from .common.errors import RunError, UserError
from .common.formats import MIB, labeled
from .common.machine import device_name
from .distributed.collectives import all_gather_object, wait_for_device
from .distributed.environment import master_endpoint, rank_and_sizes, started_by_torchrun
from .distributed.network import (
    connection_problem,
    gloo_interface,
    is_loopback,
    list_interfaces,
    use_reachable_interface,
)
from .distributed.process_group import join
from .distributed.rendezvous import exchange, open_store, wait_for_keys
from .distributed.world import World
from .flags import add_check_flags
from .program import SECONDS_OF_RANK_0, launch
from .settings import Settings

TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class Place:
    """Where a rank is, and the address on which its gloo would wait for other ranks."""

    host: str
    local_rank: int
    local_size: int
    device: str
    versions: str
    address: str = "?"
    interface: str = "?"
    port: int = 0
    problem: str | None = None

    def __str__(self) -> str:
        place = f"local rank {self.local_rank} of {self.local_size}, {self.host}, {self.device}"
        return f"{place}, {self.address} ({self.interface}), {self.versions}"


def main(settings: Settings, connect: tuple[str, int] | None) -> None:
    if connect is not None:
        where = f"{connect[0]}, port {connect[1]}"
        if (problem := connection_problem(*connect)) is not None:
            raise RunError(f"{where}: {problem}")
        print_line("connected", where)
        return
    if settings.ddp_timeout == Settings.ddp_timeout:
        settings = replace(settings, ddp_timeout=TIMEOUT_SECONDS)
    find_ranks(settings)
    with join(settings) as world:
        report(sum_over_ranks, world, name="all-reduce", what="1 MiB, with the correct sum")
        report(train_toy_model, world, name="toy DDP step", what="with equal weights afterwards")


def find_ranks(settings: Settings) -> None:
    """Print where each rank is, and check that the nodes can connect to each other. Collective.

    Raises:
        RunError: a rank is missing, or a node cannot reach another one.
    """
    rank, size, local_rank, local_size = rank_and_sizes()
    timeout = timedelta(seconds=settings.ddp_timeout)
    has_peers = size > local_size  # on other nodes
    if has_peers:
        use_reachable_interface()
    store = open_store(timeout) if started_by_torchrun() else HashStore()
    share = partial(exchange, store, rank=rank, size=size, timeout=timeout)
    place = Place(socket.gethostname(), local_rank, local_size, *describe_device(settings.use_cpu, local_rank))
    try:
        address, interface = gloo_interface()
        place = replace(place, address=address, interface=interface)
        if has_peers and is_loopback(address):
            raise UserError(f"other nodes cannot reach it; set GLOO_SOCKET_IFNAME to one of {list_interfaces()}")
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = socket.create_server((address, 0), family=family)
    except (UserError, OSError) as problem:
        server, place = socket.socket(), replace(place, problem=str(problem))
    with server:  # until all nodes have tried to connect
        if place.problem is None:
            place = replace(place, port=server.getsockname()[1])
        places = [Place(**fields) for fields in share("place", asdict(place))]
        if rank == 0:
            print_places(places)
        is_first = has_peers and local_rank == 0  # of the ranks of this node
        problems = share("problem", place.problem or (find_unreachable(places, rank) if is_first else None))
    found = [f"rank {other} ({places[other].host}): {text}" for other, text in enumerate(problems) if text is not None]
    if found:
        store.set(f"read/{rank}", "")
        if rank == 0:  # the store closes when rank 0 ends
            wait_for_keys(store, [f"read/{other}" for other in range(size)], timeout)
        if local_rank != 0:  # the first rank of each node prints the line
            time.sleep(SECONDS_OF_RANK_0)
            sys.exit(1)
        raise RunError(found[0])


def describe_device(use_cpu: bool, local_rank: int) -> tuple[str, str]:
    """Return the device that this rank would use, and the versions of torch and the backend."""
    if use_cpu or not torch.cuda.is_available():
        return "cpu", f"torch {torch.__version__}, gloo"
    name = "no such GPU"
    if local_rank < torch.cuda.device_count():
        name = device_name(torch.device("cuda", local_rank))
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "is not available"
    return f"cuda:{local_rank} ({name})", f"torch {torch.__version__}, NCCL {nccl}"


def print_places(places: Sequence[Place]) -> None:
    nodes = sum(place.local_rank == 0 for place in places)
    where = f", which meet at {master_endpoint()}" if len(places) > 1 else ""
    print_line("ranks", f"{len(places)} on {nodes} node(s){where}")
    for rank, place in enumerate(places):
        print_line(f"rank {rank}", str(place))
    if len({place.versions for place in places}) > 1:
        print_line("warning", "the ranks have different versions")


def find_unreachable(places: Sequence[Place], rank: int) -> str | None:
    """Connect to the first rank of every other node; return the first problem, or None."""
    others = [other for other, place in enumerate(places) if place.local_rank == 0 and place.port and other != rank]
    with ThreadPoolExecutor(max_workers=32) as pool:
        problems = pool.map(lambda other: connection_problem(places[other].address, places[other].port), others)
        for other, problem in zip(others, problems, strict=True):
            if problem is not None:
                place = places[other]
                return (
                    f"cannot connect to rank {other} ({place.host}) at {place.address}, port {place.port}, interface "
                    f"{place.interface}: {problem}; GLOO_SOCKET_IFNAME selects another interface"
                )
    return None


def report(function: Callable[[World], bool], world: World, *, name: str, what: str) -> None:
    """Call a function that uses collectives twice, and print its times. Collective.

    Raises:
        RunError: it returned False on any rank.
    """
    milliseconds = []
    for _ in range(2):
        wait_for_device(world)
        start = time.perf_counter()
        is_correct = function(world)
        milliseconds.append(1000 * (time.perf_counter() - start))
        if not all(all_gather_object(is_correct, world)):
            raise RunError(f"the {name} gave a wrong result")
    first, second = milliseconds
    if world.is_main_process:
        print_line(name, f"{what}: {first:.1f} ms the first time, {second:.1f} ms the second time")


def sum_over_ranks(world: World) -> bool:
    total = torch.full((MIB // 4,), float(world.rank + 1), device=world.device)
    dist.all_reduce(total)
    wait_for_device(world)
    return bool((total == world.size * (world.size + 1) / 2).all())


def train_toy_model(world: World) -> bool:
    """Train one step with different rows on each rank; return whether all ranks have the same weights afterwards."""
    torch.manual_seed(world.rank)  # different weights, too: DDP copies those of rank 0
    model = DistributedDataParallel(torch.nn.Linear(16, 4).to(world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 16, device=world.device)).square().mean().backward()
    optimizer.step()
    weights: list[Any] = [parameter.tolist() for parameter in model.parameters()]
    return all(other == weights for other in all_gather_object(weights, world))


def print_line(name: str, text: str) -> None:
    print(labeled(name, text), flush=True)


if __name__ == "__main__":
    launch(main, __doc__, add_check_flags)
