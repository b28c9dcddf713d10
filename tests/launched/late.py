"""Join a process group as a rank that starts later than the others, and print what the waiting costs each rank."""

from __future__ import annotations

import os
import sys
import threading
import time

from app.distributed.process_group import join
from app.settings import Settings

if __name__ == "__main__":
    late, delay = sys.argv[1:]
    if os.environ["RANK"] == late:
        threading.Event().wait(float(delay))
    start = time.perf_counter(), time.process_time()
    with join(Settings(use_cpu=True, threads=1)) as world:
        seconds, cpu_seconds = time.perf_counter() - start[0], time.process_time() - start[1]
        sys.stdout.write(
            f"rank {world.rank}: {seconds:.3f} {cpu_seconds:.3f}\n"
        )  # print() writes the end of line apart
