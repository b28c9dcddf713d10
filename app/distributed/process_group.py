"""Start and end the process group: `with join(settings) as world:`."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.utils.store import synchronize
from torch.distributed.rendezvous import rendezvous
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from ..common.machine import automatic_precision, unusable_accelerator, use_deterministic_algorithms
from ..settings import Settings
from .collectives import barrier, raise_if_any_failed
from .environment import SINGLE_PROCESS, default_threads, rank_and_sizes, started_by_torchrun
from .failure import OUTCOMES, exit_line, report_failure, report_failure_to_connect
from .network import use_reachable_interface
from .world import Topology, World, create_node_groups

NCCL_GRACE = timedelta(seconds=60)


@contextmanager
def join(settings: Settings, problem: str | None = None) -> Iterator[World]:
    """Join the process group, together with all other ranks, and leave it with them at the end of the block.

    NCCL connects GPUs (`cuda:LOCAL_RANK`), gloo connects CPUs. Plain `python -m …` makes a group of one rank, so that
    the same code runs everywhere. An exception in the block ends the process with one line (see `failure.py`).

    Args:
        problem: a mistake on this rank, such as an unknown flag. Every rank raises it as soon as they can communicate.
    """
    try:
        world, problem = _start(settings, problem)
    except Exception as failure:
        report_failure_to_connect(failure, rank_and_sizes()[0])
    try:
        raise_if_any_failed(problem, world)
        yield world
        barrier(world)  # a rank that fails in its last action, such as writing the results, fails the run
    except tuple(OUTCOMES) as outcome:
        line, status = exit_line(outcome)
        if world.is_main_process:
            print(line, file=sys.stderr, flush=True)
        with suppress(Exception):  # a rank was killed meanwhile; the outcome has been printed
            barrier(world)  # torchrun ends the other ranks as soon as the first one exits
            dist.destroy_process_group()
        sys.exit(status)
    except Exception as failure:
        report_failure(failure, world)
    # A DDP module that outlives its process group can abort the interpreter at exit ("terminate called without an
    # active exception", pytorch#190489), so it is collected first.
    gc.collect()
    dist.destroy_process_group()


def _start(settings: Settings, problem: str | None) -> tuple[World, str | None]:
    """Connect the ranks; return this rank's world, and its problem or None."""
    rank, size, local_rank, local_size = rank_and_sizes()
    # With --logical_ranks, the number must not depend on the number of processes, because it affects rounding.
    threads = settings.threads or default_threads(settings.logical_ranks or local_size)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # otherwise accelerate may choose another number
    torch.set_num_threads(threads)

    if size > local_size:
        use_reachable_interface()
    timeout = timedelta(seconds=settings.ddp_timeout)
    store = _open_store(timeout, one_node=size == local_size)
    device_type, unusable = find_device(settings, local_rank, local_size)
    problem = problem or unusable or problem_of_restarts(size == local_size)
    if device_type == "cpu" and os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        problem = problem or "TORCH_DISTRIBUTED_DEBUG=DETAIL: torch crashes with it in DDP over gloo: set it to INFO"
    own = Place(socket.gethostname(), local_size, device_type, problem)
    # Through the store, because the backend depends on the devices of all ranks.
    pickled = synchronize(store, pickle.dumps(own), rank, size, "place/", timeout.total_seconds())
    places: list[Place] = [pickle.loads(place) for place in pickled]
    device_type, problem = common_device_type(places, rank)
    equal = size % local_size == 0 and all(place.local_size == local_size for place in places)
    topology = Topology(size, local_size if equal else size)  # torchrun numbers the ranks of a node consecutively

    world = World(rank, size, local_rank, local_size, torch.device("cpu"), store, timeout, topology)
    limit = timeout
    if device_type == "cpu":
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    else:
        device = torch.device("cuda", local_rank)
        if settings.deterministic:
            use_deterministic_algorithms()  # before the CUDA context and before NCCL read their environment variables
        torch.cuda.set_device(device)  # before NCCL starts; otherwise every rank opens a context on GPU 0
        if settings.tf32:
            torch.backends.cuda.matmul.allow_tf32 = True  # here, in both training paths: Trainer leaves it as it is
        # NCCL's watchdog aborts the process from C++, so no exception reaches Python and our error line is not printed.
        # Therefore Python has to time out first. Each wait of the host goes either through gloo or through
        # `wait_for_device`, and both raise after `--ddp_timeout`. The watchdog counts from when a collective was
        # enqueued; such a wait may begin later, by at most a step, an evaluation or a checkpoint, and reporting the
        # failure takes a few seconds. Doubling covers both. The alternatives are worse: TORCH_NCCL_BLOCKING_WAIT=1
        # blocks the host in every backward pass, and TORCH_NCCL_ASYNC_ERROR_HANDLING=2 lets it continue on the
        # undefined results of an aborted collective.
        limit = timeout + max(timeout, NCCL_GRACE)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=limit, device_id=device)
        world = replace(world, device=device, control_group=dist.new_group(backend="gloo", timeout=timeout))
    return replace(world, node_groups=create_node_groups(rank, topology, limit)), problem


def _open_store(timeout: timedelta, *, one_node: bool) -> Store:
    """Return the store in which the ranks of this attempt find each other.

    `torchrun --max-restarts` starts new processes over its own store, whose keys outlive the old ones: the new ranks
    would read the addresses that dead ranks left there and fail to connect (pytorch#135712, #167288). So each attempt
    has its own prefix on one node. The agents of several nodes may count different numbers of restarts
    (pytorch#108158): they need a new store for each attempt, see `problem_of_restarts`.
    """
    if not started_by_torchrun():
        os.environ.update(SINGLE_PROCESS)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if attempt is not None:  # Linux sends SIGTERM if torchrun dies: after a SIGKILL it cannot end its ranks
        _prctl_pr_set_pdeathsig(signal.SIGTERM)
    store: Store = next(rendezvous("env://", timeout=timeout))[0]
    return PrefixStore(f"attempt/{attempt}", store) if one_node else store


def problem_of_restarts(one_node: bool) -> str | None:
    """Return why torchrun could not restart the ranks, or None."""
    has_new_stores = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if one_node or has_new_stores or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return None
    return "--max-restarts on several nodes: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, with --rdzv_backend=c10d"


class Place(NamedTuple):
    """The node of a rank, the device type that it would use, and its problem, if any."""

    host: str
    local_size: int
    device_type: str
    problem: str | None = None


def find_device(settings: Settings, local_rank: int, local_size: int) -> tuple[str, str | None]:
    """Return the device type that this rank would use, and why it cannot, or None. This creates no CUDA context."""
    if settings.use_cpu or not torch.cuda.is_available():
        without_tf32 = "--tf32 needs GPUs, and this job uses CPUs: remove it" if settings.tf32 else None
        return "cpu", (None if settings.use_cpu else unusable_accelerator()) or without_tf32
    problem = None
    if local_size > (gpus := torch.cuda.device_count()):
        problem = f"{socket.gethostname()} has {gpus} GPU(s) and each rank needs one: start fewer, or add --use_cpu"
        return "cuda", f"--nproc_per_node={local_size}: {problem}"
    # On older GPUs PyTorch emulates bfloat16, which is slower than fp32.
    if settings.precision == "bf16" and automatic_precision(settings.use_cpu, local_rank) != "bf16":
        problem = "--precision bf16: {} does not support bfloat16: use --precision fp16 or fp32"
    if settings.tf32 and (torch.version.hip or torch.cuda.get_device_properties(local_rank).major < 8):
        problem = "--tf32: {} has no TF32: remove it"
    return "cuda", problem and problem.format(f"cuda:{local_rank} ({torch.cuda.get_device_name(local_rank)})")


def common_device_type(places: Sequence[Place], rank: int) -> tuple[str, str | None]:
    """Return the device type that all ranks use, and the problem of this rank or None.

    Ranks that start different backends would wait for each other forever. If any rank has a problem, all use the CPU
    and gloo to report it.
    """
    if any(place.problem is not None for place in places):
        return "cpu", places[rank].problem
    if len({place.device_type for place in places}) == 1:
        return places[0].device_type, None
    without = [f"{other} ({place.host})" for other, place in enumerate(places) if place.device_type == "cpu"]
    return "cpu", (
        f"rank(s) {', '.join(without)} would use the CPU and the other ranks a GPU: make GPUs visible on every node, "
        f"or add --use_cpu on every node"
    )
