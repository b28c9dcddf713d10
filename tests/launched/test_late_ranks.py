"""A rank that starts later than the others: they wait without a line of output and without using a core."""

from __future__ import annotations

import json

import pytest
from helpers.jobs import Job

pytestmark = [pytest.mark.launched, pytest.mark.slow]
DELAY = 6.0
# Joins a process group, and prints what this costs each rank, in seconds and in seconds of a core.
PROGRAM = """
import json, os, sys, threading, time
from app.distributed.process_group import join
from app.settings import Settings
late, delay = sys.argv[1:]
if os.environ["RANK"] == late:
    threading.Event().wait(float(delay))
start = time.perf_counter(), time.process_time()
with join(Settings(use_cpu=True, threads=1)) as world:
    costs = [time.perf_counter() - start[0], time.process_time() - start[1]]
    sys.stdout.write(json.dumps([world.rank, *costs]) + "\\n")  # print() writes the end of line apart
"""


@pytest.mark.parametrize("late", [0, 1])
def test_waiting_for_a_late_rank_is_silent_and_idle(tmp_path, late):
    (tmp_path / "late.py").write_text(PROGRAM)
    with Job(str(tmp_path / "late.py"), late, DELAY, cwd=tmp_path, ranks=3, OMP_NUM_THREADS="1") as job:
        done = job.finish()
    assert (done.status, done.err) == (0, "")
    ranks, seconds, cpu_seconds = zip(*map(json.loads, done.out.splitlines()), strict=True)
    assert {*ranks} == {0, 1, 2}
    assert max(seconds) > DELAY / 2, "no rank has waited"
    assert max(cpu_seconds) < 0.1 * max(seconds)
