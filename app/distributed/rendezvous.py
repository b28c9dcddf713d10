"""How the ranks find each other: a separate store for each attempt of a torchrun job.

`torchrun --max-restarts` starts new processes over the same TCPStore, whose keys outlive the old processes. New ranks
would read the addresses that dead ranks left there and fail to connect (pytorch#135712, #167288), so each attempt has
its own prefix. The restart count cannot serve as one, because it may differ between nodes (pytorch#108158).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from ..common.errors import RunError
from .environment import become_single_process, rank_and_sizes, started_by_torchrun

POLL_SECONDS = 0.005, 0.2  # from the first to the slowest poll: a waiting rank must neither delay others nor use a core
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def open_store(timeout: timedelta) -> Store:
    """Return the store of this attempt, once all of its ranks are present. Collective.

    Raises:
        RunError: a rank did not arrive in time, or torchrun has already ended.
    """
    if not started_by_torchrun():
        become_single_process()
        return HashStore()
    terminate_with_torchrun()
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    return per_attempt_store(store, rank=rank, size=size, timeout=timeout)


def terminate_with_torchrun() -> None:
    """Let Linux send SIGTERM to this process when torchrun dies: after a SIGKILL torchrun cannot end its workers."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # A process whose parent has died gets process 1 as its parent. In a container, torchrun itself may be process 1.
    init = 1
    if os.getppid() == init and b"python" not in Path(f"/proc/{init}/cmdline").read_bytes():
        raise RunError(f"rank {rank_and_sizes()[0]}: torchrun ended before the ranks had connected")


def per_attempt_store(store: Store, *, rank: int, size: int, timeout: timedelta) -> PrefixStore:
    """Agree on a prefix that only the processes of this attempt know. Collective; returns when all are present.

    Each rank publishes a random token and waits for an answer to that token. Rank 0 answers each token that it finds
    with the attempt's id and waits for a confirmation. A token that a dead rank left is never confirmed, and its
    successor overwrites it.

    Raises:
        RunError: a rank did not arrive in time.
    """
    if rank == 0:
        attempt = uuid.uuid4().hex
        for other in range(1, size):
            _answer(store, other, attempt=attempt, timeout=timeout)
    else:
        token = uuid.uuid4().hex
        store.set(f"handshake/{rank}", token)
        answer = f"answer/{rank}/{token}"
        if not wait_for_keys(store, [answer], timeout):
            raise RunError(f"rank 0 did not answer rank {rank} within {timeout.total_seconds():.0f} s")
        attempt = store.get(answer).decode()
        store.set(f"confirmed/{attempt}/{rank}", "")
    return PrefixStore(f"attempt/{attempt}", store)


def _answer(store: Store, other: int, *, attempt: str, timeout: timedelta) -> None:
    """Answer every token of a rank until the rank confirms the attempt."""

    def is_confirmed() -> bool:
        if store.check([f"handshake/{other}"]):
            token = store.get(f"handshake/{other}").decode()  # the first token may be a dead rank's
            store.set(f"answer/{other}/{token}", attempt)
        return store.check([f"confirmed/{attempt}/{other}"])

    if not _poll(is_confirmed, timeout):
        raise RunError(f"rank {other} did not arrive within {timeout.total_seconds():.0f} s")


def exchange(store: Store, name: str, value: Any, *, rank: int, size: int, timeout: timedelta) -> list[Any]:
    """Return every rank's value, in rank order, through the store: before there is a process group. Collective.

    Args:
        name: of this exchange, different from that of any other one in this store.
        value: anything that JSON can represent.

    Raises:
        RunError: a rank did not call this in time.
    """
    store.set(f"{name}/{rank}", json.dumps(value))
    keys = [f"{name}/{other}" for other in range(size)]
    if not wait_for_keys(store, keys, timeout):
        missing = ", ".join(str(other) for other, key in enumerate(keys) if not store.check([key]))
        raise RunError(f"rank(s) {missing} did not connect within {timeout.total_seconds():.0f} s")
    return [json.loads(store.get(key)) for key in keys]


def wait_for_keys(store: Store, keys: Sequence[str], timeout: timedelta) -> bool:
    """Wait until the store has all keys; return whether it does.

    `store.wait` does the same, but PyTorch prints two lines on standard error each time that it times out.
    """
    return _poll(lambda: store.check(list(keys)), timeout)


def _poll(condition: Callable[[], bool], timeout: timedelta) -> bool:
    """Wait until a condition is true, checking it less and less often; return whether it is."""
    deadline = time.monotonic() + timeout.total_seconds()
    pause, longest = POLL_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return True
