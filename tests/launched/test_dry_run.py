"""`--dry_run` under torchrun: rank 0 prints the plan, and the job ends with status 0."""

from __future__ import annotations

import pytest
from helpers.jobs import SAMPLE_CSV

pytestmark = [pytest.mark.launched, pytest.mark.slow]


def test_a_job_prints_its_plan_and_ends(launch, tmp_path):
    """With app.ddp_loop; tests/plan/test_dry_run.py calls both paths in its own process."""
    flags = ["--csv", SAMPLE_CSV, "--use_cpu", "--threads=1", "--logical_ranks=4", "--strategy=zero2"]
    done = launch("ddp_loop", *flags, "--dry_run", ranks=2)
    assert (done.status, done.error_lines) == (0, []), done.err
    assert done.out.count("4 logical ranks (on 2 rank(s)) x 8 rows") == 1, "only rank 0 prints"
    assert done.out.count("| zero2 |") == 2, "memory and traffic of this strategy only"
    assert list(tmp_path.iterdir()) == []
