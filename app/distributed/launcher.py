"""Starts a torchrun job as a child, shows what it shows, and ends it with us."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from app.interrupts import as_interrupt
from app.settings import REPOSITORY

GRACE_SECONDS = 40  # torchrun itself gives its workers 30 s between SIGTERM and SIGKILL


def torchrun(module: str, flags: Sequence[str], nproc_per_node: int, threads: int = 0) -> int:
    """Runs `torchrun --standalone --nproc_per_node=N -m module flags`; returns its exit status.

    Whatever ends this process while it waits (Ctrl-C, SIGTERM, an exception) ends the job first, with all its workers.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc_per_node}"]
    # Said here, torchrun needn't decide on a number of threads and tell of it.
    threads = threads or max(1, (os.cpu_count() or 1) // nproc_per_node)
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}
    with as_interrupt(signal.SIGTERM, signal.SIGHUP):
        # A session of its own: Ctrl-C in a terminal would reach torchrun twice, and the second one cuts its clean-up
        # short.
        job = subprocess.Popen([*command, "-m", module, *flags], env=environment, start_new_session=True)
        try:
            return job.wait()
        finally:
            if job.poll() is None:
                _end(job)


def _end(job: subprocess.Popen[bytes]) -> None:
    """Ends torchrun, which ends its workers; they also end by themselves where it is killed. Not to be interrupted."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    job.send_signal(signal.SIGTERM)
    try:
        job.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()
