"""The ranks of a run: how they meet, agree, reduce and part. The only file that reads RANK and its kin.

`launch(main)` runs an entry point and turns what went wrong into one line and an exit status; inside it,
`with join(settings) as world:` is the life of the process group. The collectives at the end are the few that the rest
of the code needs. Each must be called by every rank, never under `if world.is_main`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar

import numpy as np
import psutil
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record
from torch.distributed.rendezvous import rendezvous

from app.distributed.environment import check_environment
from app.distributed.generation import living_store
from app.errors import (
    AlreadyFinished,
    Preempted,
    RunError,
    UserError,
    escape_control_characters,
    print_what_the_encoding_lacks_as_escapes,
)
from app.machine import use_deterministic_algorithms
from app.settings import Settings, parse_settings

T = TypeVar("T")
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
LAST_WORDS_SECONDS = 3.0
POLL_SECONDS = 0.0005
NCCL_GRACE = timedelta(seconds=60)
# torch has no class for gloo's errors: they are RuntimeErrors that begin with the place in gloo's sources, or with one
# of these texts. Anchored, so that a path in another message can't match.
LOST_CONTACT = re.compile(
    r"\[[^\[\]]*\bgloo/(transport|rendezvous)/[\w/]+\.(cc|h):\d+\] |Gloo connectFullMesh failed with "
    r"|Application timeout caused pair closure|NCCL [Ee]rror|NCCL communicator was aborted"
)


class AgreedError(UserError):
    """A user's mistake that every rank knows of and raises at the same place, so that all can leave in good order."""


@dataclass(frozen=True)
class World:
    """This process's place among the ranks of the run."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def say(self, text: str) -> None:
        """Prints once, on rank 0: no collective."""
        if self.is_main:
            print(text, flush=True)


# ---- the life of a process ------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """What the line that tells of a failure says besides its cause. There is one in a process: `progress`."""

    step: int = 0
    checkpoint: Path | None = None

    def __str__(self) -> str:
        checkpoint = escape_control_characters(str(self.checkpoint or "none"))
        return f"after step {self.step}; last good checkpoint: {checkpoint}"


progress = Progress()
_living_store: Store | None = None  # this generation's own
# Host-side collectives (objects, barriers) run over gloo: on a GPU this is a second group next to NCCL's, on a CPU the
# default group (None). Waiting in gloo, a rank gets a Python exception; waiting for NCCL, it would be aborted.
_control_group: dist.ProcessGroup | None = None
_timeout = timedelta(seconds=Settings.ddp_timeout)


def launch(main: Callable[[Settings], None], description: str | None) -> NoReturn:
    """Runs an entry point and exits, with one line from one rank where it did not finish.

    0: finished, also where a restarted job finds it finished. 2: the user's mistake. 75: asked to stop, a checkpoint
    was saved. 1: the run failed. 130: Ctrl-C before or after the training.
    """
    print_what_the_encoding_lacks_as_escapes()
    try:
        check_environment()  # before anything asks for the rank
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    try:
        record(_parse_and_run, OneLineForUsers())(main, description)
        outcome = None
    except AgreedError as problem:
        outcome = f"error: {problem}", 2
    except Preempted as stop:
        outcome = f"stopped: {stop}", 75
    except AlreadyFinished as message:
        outcome = str(message), 0
    except RunError as failure:
        outcome = f"error: {failure} ({progress})", 1
    except KeyboardInterrupt:
        if _rank() == 0:
            print("interrupted", file=sys.stderr)
        _exit_now(130)
    except Exception as problem:
        _fail(problem)
    # Behind the handlers nothing holds the frames of `main` any longer, and so no DDP module outlives the group.
    if outcome is not None:
        _leave_together(*outcome)
    sys.exit(0)


def _leave_together(line: str, status: int) -> NoReturn:
    """For what all ranks know of: the line is out before any rank leaves, for torchrun ends the others with the
    first."""
    if _rank() == 0 or not dist.is_initialized():
        print(line, file=sys.stderr, flush=True)
    if dist.is_initialized():
        barrier()
        _leave()
    sys.exit(status)


def _fail(problem: Exception) -> NoReturn:
    """For what befalls one rank. A rank whose peers are gone finds out who, and leaves the telling to one of the
    living."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, for the first rank that leaves: let the line out first
    cause = escape_control_characters(" ".join(str(problem).split())) or type(problem).__name__
    lost_contact = is_lost_contact(problem)
    if lost_contact and _living_store is None:
        print(f"error: rank {_rank()} did not meet the other ranks: {cause}", file=sys.stderr, flush=True)
    elif not lost_contact:
        if not isinstance(problem, OSError):
            traceback.print_exc()
        _last_words("own cause", wait=False)
        print(f"error: rank {_rank()} failed {progress}: {cause}", file=sys.stderr, flush=True)
    else:
        words = _last_words("lost contact", wait=True)
        missing = [rank for rank, word in enumerate(words) if word is None]
        if "own cause" not in words and words.index("lost contact") == _rank():
            who = f"lost contact with rank(s) {', '.join(map(str, missing))}" if missing else f"lost contact: {cause}"
            print(f"error: rank {_rank()} {who}, {progress}", file=sys.stderr, flush=True)
    _exit_now(1)


def is_lost_contact(problem: Exception) -> bool:
    """Tell whether an exception says that another rank can't be reached, as opposed to a cause on this rank."""
    if isinstance(problem, dist.DistError):
        return True
    return isinstance(problem, RuntimeError) and LOST_CONTACT.match(str(problem)) is not None


def _last_words(word: str, wait: bool) -> list[str | None]:
    """Leaves a word in the store and reads those of the others; None for a rank that has said nothing, or can't be
    heard."""
    words: list[str | None] = [None] * _env("WORLD_SIZE", 1)
    words[_rank()] = word
    store = _living_store
    if store is None:
        return words

    def exchange() -> None:
        store.set(f"last words/{_rank()}", word)
        for rank in range(len(words)) if wait else ():
            with suppress(RuntimeError):
                store.wait([f"last words/{rank}"], timedelta(seconds=LAST_WORDS_SECONDS))
                words[rank] = store.get(f"last words/{rank}").decode()

    talk = threading.Thread(target=exchange, daemon=True)  # the store's host may be the one that is gone
    talk.start()
    talk.join(LAST_WORDS_SECONDS * (1 + len(words)) if wait else LAST_WORDS_SECONDS)
    return list(words)


class OneLineForUsers(ErrorHandler):
    """What torchrun's own table of failures shows of this process: a user's mistake as its line, the rest with a
    traceback."""

    def record_exception(self, e: BaseException) -> None:
        path = self._get_error_file_path()
        if isinstance(e, UserError | RunError | Preempted | AlreadyFinished) and path:
            self._write_error_file(path, json.dumps({"message": f"error: {e}", "timestamp": int(time.time())}))
        else:
            super().record_exception(e)


def _parse_and_run(main: Callable[[Settings], None], description: str | None) -> None:
    if _rank() != 0 and {"-h", "--help"} & set(sys.argv[1:]):
        return  # rank 0 prints it
    try:
        settings = parse_settings(description)
    except UserError as problem:
        _join(Settings(use_cpu=True), str(problem))
        raise AssertionError("a problem that one rank brings along is raised by all") from problem
    main(settings)


@contextmanager
def join(settings: Settings) -> Iterator[World]:
    """The process group: entered together with all other ranks, left together.

    NCCL between GPUs (`cuda:LOCAL_RANK`), gloo between CPUs. Plain `python -m …` makes a group of one, so that the same
    code runs everywhere.
    """
    world = _join(settings, problem=None)
    yield world
    barrier()  # a rank that failed in its last act, such as writing the results, fails the run
    _leave()


def _join(settings: Settings, problem: str | None) -> World:
    global _control_group, _timeout
    rank, size, local_rank, local_size = (
        *(_rank(), _env("WORLD_SIZE", 1)),
        *(_env("LOCAL_RANK", 0), _env("LOCAL_WORLD_SIZE", 1)),
    )
    threads = settings.threads or max(1, (os.cpu_count() or 1) // local_size)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # accelerate would count the threads anew where it is unset
    torch.set_num_threads(threads)

    _timeout = timedelta(seconds=settings.ddp_timeout)
    store = _meet(_timeout)
    start = _start_of(settings, local_size, problem)
    device_type, problem = common_device_type(_exchange_starts(store, rank, size, start), rank)
    if device_type == "cuda":
        device = torch.device("cuda", local_rank)
        if settings.deterministic:
            use_deterministic_algorithms()  # before the CUDA context and before NCCL read their environment variables
        torch.cuda.set_device(device)  # before NCCL starts, else every rank opens a context on GPU 0
        problem = _bf16_problem(settings, device)
        dist.init_process_group(
            "nccl", store=store, rank=rank, world_size=size, timeout=nccl_timeout(_timeout), device_id=device
        )
        _control_group = dist.new_group(backend="gloo", timeout=_timeout)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_timeout)
    agree(problem)
    return World(rank, size, local_rank, local_size, device)


@dataclass(frozen=True)
class Start:
    """What a rank brings to the process group: the device type it would use, and what keeps it from starting."""

    device_type: str
    host: str
    problem: str | None = None


def _start_of(settings: Settings, local_size: int, problem: str | None) -> Start:
    """Describe this rank without creating a CUDA context: whether GPUs are used is decided by all ranks together."""
    host = socket.gethostname()
    if settings.use_cpu or not torch.cuda.is_available():
        return Start("cpu", host, problem)
    gpus = torch.cuda.device_count()
    if local_size > gpus:
        problem = problem or (
            f"--nproc_per_node={local_size}: {host} has {gpus} GPU(s) and each rank needs one: start fewer, or add "
            f"--use_cpu"
        )
    return Start("cuda", host, problem)


def _exchange_starts(store: Store, rank: int, size: int, mine: Start) -> list[Start]:
    """Return every rank's start, in rank order. Uses the store, because no backend has been chosen yet."""
    store.set(f"start/{rank}", json.dumps(asdict(mine)))
    keys = [f"start/{other}" for other in range(size)]
    store.wait(keys, _timeout)
    return [Start(**json.loads(store.get(key))) for key in keys]


def common_device_type(starts: Sequence[Start], rank: int) -> tuple[str, str | None]:
    """Choose the device type that all ranks use: ranks that start different backends would wait for each other forever.

    Args:
        starts: every rank's, in rank order.
        rank: this process's.

    Returns:
        The device type, and this rank's problem or None. Where any rank has a problem, all meet on the CPU over gloo
        to report it.
    """
    if any(start.problem is not None for start in starts):
        return "cpu", starts[rank].problem
    if len({start.device_type for start in starts}) == 1:
        return starts[0].device_type, None
    without = [f"{other} ({start.host})" for other, start in enumerate(starts) if start.device_type == "cpu"]
    return "cpu", (
        f"rank(s) {', '.join(without)} would use the CPU and the other ranks a GPU: make GPUs visible on every node, "
        f"or add --use_cpu on every node"
    )


def _bf16_problem(settings: Settings, device: torch.device) -> str | None:
    # PyTorch emulates bfloat16 on older GPUs, slower than fp32 and without tensor cores: nobody asks for that.
    if not settings.bf16 or torch.cuda.is_bf16_supported(including_emulation=False):
        return None
    return (
        f"--precision bf16: {device} ({torch.cuda.get_device_name(device)}) does not support bfloat16: use "
        f"--precision fp32"
    )


def nccl_timeout(timeout: timedelta) -> timedelta:
    """Return how long NCCL's watchdog waits before it aborts the process.

    When a collective exceeds its timeout, the watchdog thread terminates the process from C++: no exception reaches
    Python and our error line is never printed. Therefore Python has to time out first. Each wait of the host goes
    either through gloo (stop requests, object collectives, barriers) or through `wait_for_device`, and both raise after
    `--ddp_timeout`. They start to wait later than the watchdog, which counts from when a collective was enqueued, by at
    most a step, an evaluation or a checkpoint; and the report of the failure takes a few seconds. Doubling covers both.
    The watchdog remains as the backstop for a host that is blocked elsewhere inside CUDA.

    The alternatives are worse: TORCH_NCCL_BLOCKING_WAIT=1 raises in Python but blocks the host in every backward pass,
    and TORCH_NCCL_ASYNC_ERROR_HANDLING=2 lets the host continue on the undefined results of an aborted collective.
    """
    return timeout + max(timeout, NCCL_GRACE)


def wait_for_device(device: torch.device) -> None:
    """Wait until the device has done what was enqueued so far, but no longer than `--ddp_timeout`.

    Call it before the host reads the result of a collective. Such a read would block inside CUDA, where Python can't
    raise, until NCCL's watchdog aborts the process (see `nccl_timeout`).

    Raises:
        DistBackendError: the device hasn't finished, so some rank did not join a collective.
    """
    if device.type != "cuda":
        return
    event = torch.cuda.Event()
    event.record()
    deadline = time.monotonic() + _timeout.total_seconds()
    while not event.query():
        if time.monotonic() > deadline:
            raise dist.DistBackendError(f"NCCL: a collective did not finish within {_timeout.total_seconds():.0f} s")
        time.sleep(POLL_SECONDS)


def _meet(timeout: timedelta) -> Store:
    """The store through which this generation's ranks find one another."""
    global _living_store
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ.update(alone)  # accelerate looks for these
        store: Store = HashStore()
    else:
        _end_with_torchrun()
        store, _, _ = next(rendezvous("env://", timeout=timeout))
    _living_store = living_store(store, _rank(), _env("WORLD_SIZE", 1), timeout)
    return _living_store


def _end_with_torchrun() -> None:
    """Linux tells us by SIGTERM where our parent dies, however it dies: torchrun can't end its workers after a
    SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        init = 1  # takes in whose parent died before; in a container it may be torchrun itself
        if os.getppid() == init and b"python" not in Path(f"/proc/{init}/cmdline").read_bytes():
            raise RunError(f"rank {_rank()} was left alone: torchrun has ended before the ranks had met")


def launcher_ids() -> list[str]:
    """Identify the torchrun processes that started the ranks of this job, one per node. Collective.

    They stay the same when torchrun restarts its workers, also where the store that the ranks meet in does not survive.
    A run folder records them, so that a restarted job recognizes its own.

    Returns:
        Host name, process id and start time of each; empty without torchrun, which alone restarts processes.
    """
    mine = None
    if "TORCHELASTIC_RESTART_COUNT" in os.environ:
        parent = psutil.Process(os.getppid())
        # Not parent.create_time() by itself: it moves with the system clock.
        mine = f"{socket.gethostname()}:{parent.pid}:{parent.create_time() - psutil.boot_time():.2f}"
    return sorted({one for one in gather_objects(mine) if one is not None})


def _leave() -> None:
    """The one place that ends a run. A DDP module that outlives its process group can abort the interpreter at exit
    ("terminate called without an active exception", pytorch#190489): collect it first."""
    global _control_group
    gc.collect()
    # Not is_available(): without a context, synchronizing would create one, which --use_cpu rules out and which fails
    # where the GPU's memory is full.
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    dist.destroy_process_group()
    _control_group = None


def _exit_now(status: int) -> NoReturn:
    """Leaves without waiting for peers, which may be gone: a failed rank must never hang in its own clean-up."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _env(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


def _rank() -> int:
    return _env("RANK", 0)


# ---- what the ranks do together -------------------------------------------------------------------------------------


def gather_objects(value: T) -> list[T]:
    """Every rank's value (anything that pickles), in rank order, on every rank."""
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value, group=_control_group)
    return values


def barrier() -> None:
    """Wait until every rank has called this."""
    gather_objects(None)


def from_main(value: T) -> T:
    """Rank 0's value, on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0, group=_control_group)
    return values[0]


def first_problem(problem: str | None) -> str | None:
    """Each rank brings its own problem or None; all get that of the lowest rank that has one, with the rank's name."""
    for rank, text in enumerate(gather_objects(problem)):
        if text is not None:
            return text if rank == 0 else f"rank {rank}: {text}"
    return None


def agree(problem: str | None) -> None:
    """Raises `AgreedError` on every rank where any rank has a problem; each rank brings its own or None."""
    told = first_problem(problem)
    if told is not None:
        raise AgreedError(told)


@contextmanager
def together() -> Iterator[None]:
    """Work that each rank does for itself (no collective inside): one rank's mistake becomes everyone's `AgreedError`,
    so that no rank waits for one that has left."""
    problem = None
    try:
        yield
    except AgreedError:
        raise
    except UserError as error:
        problem = str(error)
    agree(problem)


@contextmanager
def local_main_first(world: World) -> Iterator[None]:
    """One process a node goes first, the others after it: they find in the cache what it has made."""
    problem = None
    if world.local_rank != 0:
        agree(None)
    try:
        yield
    except UserError as error:
        problem = str(error)
    if world.local_rank == 0:
        agree(problem)
        problem = None
    agree(problem)


def reduce_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum over ranks of a tensor of any shape and dtype, in place, on every rank."""
    dist.all_reduce(values, op=dist.ReduceOp.SUM)
    wait_for_device(values.device)  # every caller reads the result next
    return values


def reduce_mean(values: torch.Tensor) -> torch.Tensor:
    """The mean over ranks of a floating-point tensor, in place, on every rank. gloo has no AVG: SUM over world size."""
    if dist.get_backend() == "nccl":
        dist.all_reduce(values, op=dist.ReduceOp.AVG)
        wait_for_device(values.device)
        return values
    return reduce_sum(values).div_(dist.get_world_size())


def broadcast_buffers(model: torch.nn.Module) -> None:
    """Give every rank rank 0's buffers, such as the running statistics of BatchNorm. Collective.

    DDP does this before each forward pass in training, so after a step every rank has statistics of its own rows. The
    ones that are saved are rank 0's.
    """
    saved = model.state_dict().keys()
    broadcast_tensors([buffer for name, buffer in model.named_buffers() if name in saved])


def broadcast_tensors(tensors: Collection[torch.Tensor]) -> None:
    """Give every rank rank 0's values of these tensors, in place. Collective."""
    for tensor in tensors:
        dist.broadcast(tensor, src=0)
    for device in {tensor.device for tensor in tensors}:
        wait_for_device(device)


def gather_rows(positions: Sequence[int], shard: Sequence[torch.Tensor], n: int) -> NDArray[np.float64]:
    """The rows that each rank holds, put in order, on every rank: float64 (n, columns).

    Args:
        positions: the place of each of this rank's rows among all n.
        shard: batches of rows, in the order of `positions`.
    """
    mine = torch.cat(list(shard)).double().cpu().numpy() if shard else None
    whole: NDArray[np.float64] | None = None
    seen = np.zeros(n, dtype=np.int64)
    for places, rows in gather_objects((list(positions), mine)):
        if rows is not None:
            whole = np.empty((n, rows.shape[1])) if whole is None else whole
            whole[places] = rows
            np.add.at(seen, places, 1)
    assert whole is not None, "no rank has evaluated anything"
    assert (seen == 1).all(), "a row was evaluated twice or not at all"
    return whole


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process has held: the allocator's peak on a GPU, the resident set's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
