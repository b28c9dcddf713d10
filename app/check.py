"""Check that the ranks of a job reach each other and train together, before a long run does.

Two processes on this machine:

    torchrun --standalone --nproc_per_node=2 -m app.check

Two machines with 8 GPUs each; on the second one --node_rank=1:

    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=8 --master_addr=10.0.0.1 --master_port=29500 -m app.check

Rank 0 prints a line for each rank, in rank order. Then all ranks call an all-reduce and train two steps of a toy model
with DDP. The last line is the verdict, and the exit status is 0 if a training run can start, otherwise 1.

If nothing is printed within seconds, torchrun on some node does not reach node 0: try `nc -vz 10.0.0.1 29500` there.
"""

from __future__ import annotations

from .program import Program

PROGRAM = Program(__doc__, lambda parser: parser.set_defaults(ddp_timeout=30), only=("use_cpu", "ddp_timeout"))
if __name__ == "__main__":
    PROGRAM.check_command_line()  # before torch is imported, which takes seconds

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .common.errors import RunError
from .common.formats import MIB, labeled
from .common.machine import device_name
from .distributed.collectives import all_gather_object, wait_for_device
from .distributed.network import find_route
from .distributed.process_group import join
from .distributed.world import World
from .settings import Settings


def main(settings: Settings) -> None:
    with join(settings) as world:
        print_places(world)
        report(sum_over_ranks, world, name="all-reduce", what="1 MiB, with the correct sum")
        report(train_toy_model, world, name="toy DDP step", what="with equal weights afterwards")
        verdict = f"{world.size} rank(s) reach each other and train together: a training run can start"
        world.print_main(labeled("verdict", verdict))


def print_places(world: World) -> None:
    """Print where each rank is. Collective."""
    device, backend = "cpu", "gloo"
    if world.device.type == "cuda":
        device = f"{world.device} ({device_name(world.device)})"
        backend = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    master = os.environ.get("MASTER_ADDR")
    address, interface = (master and find_route(master)) or ("127.0.0.1", "lo")
    interface = os.environ.get("GLOO_SOCKET_IFNAME", interface)
    place = f"local rank {world.local_rank} of {world.local_size}, {socket.gethostname()}, {device}"
    places = all_gather_object(f"{place}, {address} ({interface}), torch {torch.__version__}, {backend}", world)
    nodes = sum(all_gather_object(world.local_rank == 0, world))
    where = f", which meet at {master}:{os.environ['MASTER_PORT']}" if world.size > 1 else ""
    world.print_main(labeled("ranks", f"{world.size} on {nodes} node(s){where}"))
    for rank, text in enumerate(places):
        world.print_main(labeled(f"rank {rank}", text))


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
            raise RunError(f"the {name} gave a wrong result: check the versions, drivers and network of all nodes")
    first, second = milliseconds
    world.print_main(labeled(name, f"{what}: {first:.1f} ms the first time, {second:.1f} ms the second time"))


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


if __name__ == "__main__":
    PROGRAM.launch(main)
