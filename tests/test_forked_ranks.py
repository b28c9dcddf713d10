"""Jobs that fork their ranks, with which the other tests train."""

from __future__ import annotations

import pytest
from helpers.jobs import forked_job
from helpers.marks import slow_after

PROGRAM = """
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from helpers.forked_ranks import fork_ranks
fork_ranks()
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
ranks = torch.tensor([10.0 ** dist.get_rank()])
dist.all_reduce(ranks)
if sys.argv[1] == str(dist.get_rank()):
    sys.exit(3)
if sys.argv[1] != "none":
    time.sleep(600)
if dist.get_rank() == 0:
    print(ranks.item(), os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"])
dist.destroy_process_group()
"""


@pytest.mark.launched
@pytest.mark.parametrize("fails", slow_after(2, ["none", "2", "0"]))
def test_forked_ranks_communicate_and_end_with_the_first_one_that_fails(tmp_path, fails):
    (tmp_path / "program.py").write_text(PROGRAM)
    with forked_job(str(tmp_path / "program.py"), fails, cwd=tmp_path, ranks=3) as job:
        done = job.finish(120)
    assert (done.status, done.out) == ((0, "111.0 3 0\n") if fails == "none" else (1, "")), done.err
