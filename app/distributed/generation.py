"""A store of its own for each generation of a torchrun job.

`torchrun --max-restarts` starts new processes over the same TCPStore, whose keys outlive the old ones: new ranks would
read the addresses that dead ranks left there and connect to nobody (pytorch#135712, #167288). A prefix that only the
living know keeps the generations apart. The restart count can't be that prefix: it may differ between nodes
(pytorch#108158).
"""

from __future__ import annotations

import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from app.errors import RunError

PATIENCE = timedelta(seconds=0.2)  # a dead rank's hello holds a restart up for so long


def living_store(store: Store, rank: int, size: int, timeout: timedelta) -> PrefixStore:
    """The part of `store` that belongs to the processes alive now; called by all of them, returns when all are there.

    Each rank says hello with a word that nobody has used before and waits for an answer to that word. Rank 0 answers
    what it finds with the generation's name, and takes for living who confirms that: a dead rank's hello is never
    confirmed, and is overwritten by its successor's.

    Raises:
        RunError: a rank did not come in time.
    """
    if rank == 0:
        generation = uuid.uuid4().hex
        for other in range(1, size):
            _greet(store, other, generation, timeout)
    else:
        word = uuid.uuid4().hex
        store.set(f"hello/{rank}", word)
        answer = f"answer/{rank}/{word}"
        try:
            store.wait([answer], timeout)
        except RuntimeError as late:
            raise RunError(f"rank 0 did not answer rank {rank} within {timeout.total_seconds():.0f} s") from late
        generation = store.get(answer).decode()
        store.set(f"confirmed/{generation}/{rank}", "")
    return PrefixStore(f"generation/{generation}", store)


def _greet(store: Store, other: int, generation: str, timeout: timedelta) -> None:
    tries = int(timeout / PATIENCE) + 1
    for _ in range(tries):
        try:
            store.wait([f"hello/{other}"], PATIENCE)
            word = store.get(f"hello/{other}").decode()
            store.set(f"answer/{other}/{word}", generation)
            store.wait([f"confirmed/{generation}/{other}"], PATIENCE)
            return
        except RuntimeError:  # the hello was a dead rank's, or none has come yet: look again
            continue
    raise RunError(f"rank {other} did not come within {timeout.total_seconds():.0f} s")
