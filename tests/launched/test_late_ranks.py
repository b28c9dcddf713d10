"""A rank that starts later than the others: they wait without a line of output and without using a core."""

from __future__ import annotations

import re

import pytest
from helpers.jobs import PROJECT, Job

pytestmark = pytest.mark.slow
DELAY = 6.0


@pytest.mark.parametrize("late", [0, 1])
def test_waiting_for_a_late_rank_is_silent_and_idle(tmp_path, late):
    program = str(PROJECT / "tests" / "launched" / "late.py")
    with Job(program, late, DELAY, cwd=tmp_path, ranks=3, OMP_NUM_THREADS="1") as job:
        done = job.finish()
    assert done.status == 0, done.err
    assert done.err == ""
    waits = {int(rank): (float(s), float(cpu)) for rank, s, cpu in re.findall(r"rank (\d): (\S+) (\S+)", done.out)}
    assert set(waits) == {0, 1, 2}
    longest = max(seconds for seconds, _ in waits.values())
    assert longest > DELAY / 2, "no rank has waited"
    assert max(cpu for _, cpu in waits.values()) < 0.1 * longest
