"""A stop request that comes too late, and a rank that starts late.

test_resumed_runs.py has the signals after which a run is resumed, and tests/record/test_run_record.py full disks.
"""

from __future__ import annotations

import json

import pytest
from helpers.architectures import write_model
from helpers.jobs import PROJECT, SAMPLE_CSV, Job

from app.runs.reader import read_run

pytestmark = [pytest.mark.launched, pytest.mark.slow]
PATHS = ("ddp_loop", "trainer_run")
FAULTY = str(PROJECT / "tests" / "launched" / "faulty.py")
BRIEF = ["--csv", SAMPLE_CSV, "--model=bert", "--max_length=32", "--train_batch_size=12", "--eval_strategy=no"]
BRIEF += ["--use_cpu", "--threads=1", "--disable_tqdm", "--output_dir=run", "--cache_dir=cache"]
BRIEF += ["--max_steps=3", "--save_strategy=no", "--eval_batch_size=4"]


@pytest.mark.parametrize("path_name", PATHS)
def test_ranks_that_are_asked_to_stop_at_the_end_of_a_run_finish_it(tmp_path, path_name):
    write_model(tmp_path / "bert", "bert")
    # BRIEF has one evaluation, after all steps.
    with Job(FAULTY, path_name, "signal_in_evaluation", *BRIEF, cwd=tmp_path, SIGNAL="SIGTERM") as job:
        done = job.finish()
    assert (done.status, done.error_lines) == (0, []), done.err
    read_run(tmp_path / "run")


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
