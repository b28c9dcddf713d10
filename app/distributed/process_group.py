"""Start and end the process group: `with join(settings) as world:`."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.utils.store import synchronize
from torch.distributed.rendezvous import rendezvous

from ..common.errors import RunError
from ..common.machine import unusable_accelerator, use_deterministic_algorithms
from ..settings import Settings
from .collectives import barrier, raise_if_any_failed
from .environment import become_single_process, default_threads, rank_and_sizes, started_by_torchrun
from .failure import ON_ALL_RANKS, exit_line, exit_now, report_failure, report_failure_to_connect
from .world import Topology, World, common_ranks_per_node, create_node_groups

NCCL_GRACE = timedelta(seconds=60)
CONNECT_SECONDS, POLL_SECONDS = 5.0, 0.1
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


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
        try:
            barrier(world)  # a rank that fails in its last action, such as writing the results, fails the run
        except Exception as failure:
            failure.add_note("after its own work was done")  # for the error line, which would say "before training"
            raise
    except ON_ALL_RANKS as outcome:
        _exit_in_order(outcome, world)
    except Exception as failure:
        report_failure(failure, world)
    _leave()


def _start(settings: Settings, problem: str | None) -> tuple[World, str | None]:
    """Connect the ranks; return this rank's world, and its problem or None."""
    rank, size, local_rank, local_size = rank_and_sizes()
    # With --logical_ranks, the number must not depend on the number of processes, because it affects rounding.
    threads = settings.threads or default_threads(settings.logical_ranks or local_size)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # otherwise accelerate may choose another number
    torch.set_num_threads(threads)

    if size > local_size:
        from .network import use_reachable_interface  # here, because jobs on one node do not need it

        use_reachable_interface()
    timeout = timedelta(seconds=settings.ddp_timeout)
    store = _open_store(timeout)
    device_type, unusable = _device_type(settings.use_cpu, local_size)
    own = RankDevice(device_type, socket.gethostname(), problem or unusable, local_rank, local_size)
    # Through the store, because the backend depends on the devices of all ranks.
    pickled = synchronize(store, pickle.dumps(own), rank, size, "device/", timeout.total_seconds())
    ranks: list[RankDevice] = [pickle.loads(device) for device in pickled]
    device_type, problem = common_device_type(ranks, rank)
    topology = Topology(size, common_ranks_per_node([(rank.host, rank.local_rank, rank.local_size) for rank in ranks]))

    world = World(rank, size, local_rank, local_size, torch.device("cpu"), store, timeout)
    if device_type == "cpu":
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        groups = create_node_groups(rank, topology, timeout)
        if settings.tf32 and problem is None:
            problem = "--tf32 needs GPUs, and this job uses CPUs: remove it"
    else:
        device = torch.device("cuda", local_rank)
        if settings.deterministic:
            use_deterministic_algorithms()  # before the CUDA context and before NCCL read their environment variables
        torch.cuda.set_device(device)  # before NCCL starts; otherwise every rank opens a context on GPU 0
        problem = _problem_of_precision(settings, device)
        if settings.tf32:
            torch.backends.cuda.matmul.allow_tf32 = True  # here, in both training paths: Trainer leaves it as it is
        limit = nccl_timeout(timeout)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=limit, device_id=device)
        world = replace(world, device=device, control_group=dist.new_group(backend="gloo", timeout=timeout))
        groups = create_node_groups(rank, topology, limit)
    return replace(world, ranks_per_node=topology.ranks_per_node, node_groups=groups), problem


def _open_store(timeout: timedelta) -> Store:
    """Return the store in which the ranks of this attempt find each other.

    `torchrun --max-restarts` starts new processes over its own store, whose keys outlive the old ones: the new ranks
    would read the addresses that dead ranks left there and fail to connect (pytorch#135712, #167288). So each attempt
    has its own prefix or, on several nodes, whose restart counts may differ (pytorch#108158), its own store. With
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and c10d, torchrun itself has a new store for each attempt.
    """
    if not started_by_torchrun():
        become_single_process()
        return HashStore()
    _terminate_with_torchrun()
    store: Store = next(rendezvous("env://", timeout=timeout))[0]
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store
    rank, size, _, local_size = rank_and_sizes()
    if size > local_size:
        return _store_of_rank_0(store, rank, timeout)
    return PrefixStore(f"attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _store_of_rank_0(store: Store, rank: int, timeout: timedelta) -> TCPStore:
    """Return a new store on rank 0, whose port the ranks find in torchrun's store."""
    master, deadline = os.environ["MASTER_ADDR"], time.monotonic() + timeout.total_seconds()
    if rank == 0:
        own = TCPStore(master, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        store.set("port of rank 0", str(own.port))
        return own
    while True:
        port = int(store.get("port of rank 0"))
        try:
            socket.create_connection((master, port), CONNECT_SECONDS).close()
            return TCPStore(master, port, is_master=False, wait_for_workers=False, timeout=timeout)
        except OSError:  # the port is still that of a rank 0 that has died
            if time.monotonic() > deadline:
                raise RunError(
                    f"rank {rank} could not connect to the other ranks: rank 0 at {master} does not answer"
                ) from None
            time.sleep(POLL_SECONDS)


def _terminate_with_torchrun() -> None:
    """Let Linux send SIGTERM to this process when torchrun dies: after a SIGKILL torchrun cannot end its workers."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # A process whose parent has died gets process 1 as its parent. In a container, torchrun itself may be process 1.
    init = 1
    if os.getppid() == init and b"python" not in Path(f"/proc/{init}/cmdline").read_bytes():
        raise RunError(f"rank {rank_and_sizes()[0]}: torchrun ended before the ranks had connected")


@dataclass(frozen=True)
class RankDevice:
    """The device type that a rank would use, its place, and its problem, if any."""

    device_type: str
    host: str
    problem: str | None = None
    local_rank: int = 0
    local_size: int = 1


def _device_type(use_cpu: bool, local_size: int) -> tuple[str, str | None]:
    """Return the device type that this rank would use, and its problem or None, without creating a CUDA context."""
    host = socket.gethostname()
    if use_cpu or not torch.cuda.is_available():
        unusable = None if use_cpu else unusable_accelerator()
        return "cpu", unusable and f"{host}: {unusable}"
    if local_size <= (gpus := torch.cuda.device_count()):
        return "cuda", None
    too_few = f"{host} has {gpus} GPU(s) and each rank needs one: start fewer, or add --use_cpu"
    return "cuda", f"--nproc_per_node={local_size}: {too_few}"


def common_device_type(ranks: Sequence[RankDevice], rank: int) -> tuple[str, str | None]:
    """Return the device type that all ranks use, and the problem of this rank or None.

    Ranks that start different backends would wait for each other forever. If any rank has a problem, all use the CPU
    and gloo to report it.
    """
    if any(device.problem is not None for device in ranks):
        return "cpu", ranks[rank].problem
    if len({device.device_type for device in ranks}) == 1:
        return ranks[0].device_type, None
    without = [f"{other} ({device.host})" for other, device in enumerate(ranks) if device.device_type == "cpu"]
    return "cpu", (
        f"rank(s) {', '.join(without)} would use the CPU and the other ranks a GPU: make GPUs visible on every node, "
        f"or add --use_cpu on every node"
    )


def _problem_of_precision(settings: Settings, device: torch.device) -> str | None:
    """Return why the device cannot compute with the settings' precision, or None."""
    gpu = f"{device} ({torch.cuda.get_device_name(device)})"
    # On older GPUs PyTorch emulates bfloat16, which is slower than fp32.
    if settings.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return f"--precision bf16: {gpu} does not support bfloat16: use --precision fp16 or fp32"
    if not settings.tf32:
        return None
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        return "--tf32: the environment variable NVIDIA_TF32_OVERRIDE=0 forbids it: unset it"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0):
        return None
    return f"--tf32: {gpu} has no TF32: remove it"


def nccl_timeout(timeout: timedelta) -> timedelta:
    """Return how long NCCL's watchdog waits before it aborts the process.

    It does so from C++, so no exception reaches Python and our error line is not printed. Therefore Python has to time
    out first. Each wait of the host goes either through gloo or through `wait_for_device`, and both raise after
    `--ddp_timeout`. The watchdog counts from when a collective was enqueued; such a wait may begin later, by at most a
    step, an evaluation or a checkpoint, and reporting the failure takes a few seconds. Doubling covers both.

    The alternatives are worse: TORCH_NCCL_BLOCKING_WAIT=1 raises in Python but blocks the host in every backward pass,
    and TORCH_NCCL_ASYNC_ERROR_HANDLING=2 lets the host continue on the undefined results of an aborted collective.
    """
    return timeout + max(timeout, NCCL_GRACE)


def _exit_in_order(outcome: Exception, world: World) -> NoReturn:
    """End the process after an error that all ranks have raised, once rank 0 has printed it."""
    line, status = exit_line(outcome)
    if world.is_main_process:
        print(line, file=sys.stderr, flush=True)
    try:
        barrier(world)  # torchrun ends the other ranks as soon as the first one exits
    except Exception:  # a rank was killed meanwhile; the outcome has been printed
        exit_now(status)
    traceback.clear_frames(outcome.__traceback__)  # their local variables hold the DDP module: see _leave
    _leave()
    sys.exit(status)


def _leave() -> None:
    """Destroy the process group, the same way in every case."""
    # A DDP module that outlives its process group can abort the interpreter at exit ("terminate called without an
    # active exception", pytorch#190489), so it is collected first.
    gc.collect()
    # Not is_available(): without a context, synchronizing would create one, which --use_cpu rules out and which fails
    # if the GPU's memory is full.
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    dist.destroy_process_group()
