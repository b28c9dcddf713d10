"""The ranks of a job as forks of one process, which has imported PyTorch and transformers for all of them.

torchrun imports them in each rank, which takes longer than to train a tiny model. So jobs that test what ranks compute
are started like this, and torchrun starts those that test how ranks start, fail, restart and end.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys

from torch.distributed import TCPStore


def fork_ranks() -> None:
    """Return in each of FORKED_RANKS new processes, with torchrun's variables. Without that variable, do nothing.

    This process waits for them and exits: with status 0 if all of them do. When the first one fails, it kills the rest.
    """
    size = int(os.environ.get("FORKED_RANKS", "0"))
    if not size:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # a collection in a rank would copy the memory that it shares with this process
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    ranks = set()
    for rank in range(size):
        if not (pid := os.fork()):
            listener.close()
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
            os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_PORT": str(port)}
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            return
        ranks.add(pid)
    # After the forks, because the store's thread would not exist in them. Until now, their connections wait.
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)
    del store
    sys.exit(0)
