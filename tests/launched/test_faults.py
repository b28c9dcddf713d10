"""Faults at exact moments: what must not be lost, overwritten, or half-written, on both training paths.

test_resumed_runs.py has the signals after which a run is resumed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
from helpers.architectures import write_model
from helpers.jobs import PROJECT, SAMPLE_CSV, Job, read_steps

from app.runs.reader import read_run

pytestmark = [pytest.mark.launched, pytest.mark.slow]
PATHS = ("ddp_loop", "trainer_run")
FAULTY = str(PROJECT / "tests" / "launched" / "faulty.py")
SMALL = ["--csv", SAMPLE_CSV, "--model=bert", "--max_length=32", "--train_batch_size=12", "--eval_strategy=no"]
SMALL += ["--use_cpu", "--threads=1", "--disable_tqdm", "--output_dir=run"]
BRIEF = [*SMALL, "--max_steps=3", "--save_strategy=no", "--eval_batch_size=4"]


@pytest.fixture
def start(tmp_path) -> Callable[..., Job]:
    """Start a program in the test's folder, whose runs are in `run` and train the model `bert`."""
    write_model(tmp_path / "bert", "bert")

    def job(program: str, *flags: Any, **options: Any) -> Job:
        return Job(program, *flags, "--cache_dir=cache", cwd=tmp_path, **options)

    return job


# ---- disks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path_name", "then"), [("ddp_loop", "continue"), ("trainer_run", "stop")])
def test_a_completely_full_disk(start, mount, path_name, then):
    disk = mount("size=64m")
    run = disk / "run"
    flags = [*SMALL, "--max_steps=50", "--logging_steps=1", "--save_strategy=steps", "--save_steps=10"]
    flags += ["--eval_strategy=steps", "--eval_steps=15", f"--on_save_failure={then}", f"--output_dir={run}"]
    # The disk is full for 40 steps, whose log lines need more space than the last block of the file has left.
    variables = {"FILLER": str(disk / "filler"), "FROM": "5", "TO": "45"}
    # With --on_save_failure stop, a log that rank 0 cannot write ends the other rank as well.
    with start(FAULTY, path_name, "fill_disk", *flags, ranks=0 if then == "continue" else 2, **variables) as job:
        done = job.finish()
    if then == "stop":
        assert done.status == 1
        (line,) = done.error_lines
        assert "No space left" in line
        return
    assert done.status == 0, done.err
    assert any("No space left" in line for line in done.out.splitlines() if line.startswith("warning: ")), done.out
    assert [step["step"] for step in read_steps(run)] == list(range(1, 51))
    assert pd.read_json(run / "evaluations.jsonl", lines=True)["step"].tolist() == [15, 30, 45, 50]
    # Others may exist: a tmpfs counts its free pages per CPU, so a small file may still fit into one that is full.
    assert (run / "checkpoints" / "checkpoint-50" / "run_state.json").is_file()
    read_run(run)


# ---- requests to stop ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path_name", PATHS)
def test_ranks_that_are_asked_to_stop_at_the_end_of_a_run_finish_it(start, tmp_path, path_name):
    # BRIEF has one evaluation, after all steps.
    with start(FAULTY, path_name, "signal_in_evaluation", *BRIEF, SIGNAL="SIGTERM") as job:
        done = job.finish()
    assert (done.status, done.error_lines) == (0, []), done.err
    read_run(tmp_path / "run")


# ---- ranks that start later than the others --------------------------------------------------------------------------

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
