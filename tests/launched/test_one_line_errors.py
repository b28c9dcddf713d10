"""A job that fails prints one line from one rank, whether all ranks fail, some of them, or none because one is silent.

What the lines say is tested in one process, beside the code. Here is one job for each way in which they get out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import pytest
from helpers.architectures import write_model
from helpers.jobs import Job, TrainingRun, count_steps, write_reviews
from helpers.marks import slow_after

pytestmark = pytest.mark.launched
PATHS = ("ddp_loop", "trainer_run")
TINY = ["--csv=reviews.csv", "--max_length=32", "--train_batch_size=12", "--eval_strategy=no"]
TINY += ["--use_cpu", "--cache_dir=cache", "--threads=1", "--disable_tqdm"]
BRIEF = [*TINY, "--max_steps=1", "--save_strategy=no"]
ENDLESS = [*TINY, "--model=bert", "--max_steps=50000", "--save_strategy=no", "--ddp_timeout=15", "--output_dir=run"]
NOT_FINITE = ["--learning_rate=1e30", "--warmup_steps=0", "--max_grad_norm=0", "--max_steps=9", "--output_dir=run"]
FAULTY = str(Path(__file__).with_name("faulty.py"))
ON_GPUS = ["ddp_loop", "simulate_gpus", *BRIEF, "--use_cpu=false"]


def freeze_rank_1(job: Job, folder: Path) -> None:
    job.wait_for(lambda: count_steps(folder / "run") >= 5)
    frozen = job.rank(1)
    frozen.suspend()
    job.wait_for(lambda: "lost contact" in job.text)
    frozen.kill()  # torchrun would do so 30 s later


@dataclass(frozen=True)
class Case:
    """A job that fails.

    Attributes:
        flags: its command line.
        line: what its one line contains.
        during: what happens to it while it trains.
        rank_status: the status of the ranks, which torchrun's summary names; torchrun's own is always 1.
        writes: what it may write, besides the token cache.
    """

    flags: list[str]
    line: str
    program: str = "ddp_loop"
    ranks: int = 2
    rank_status: int | None = 2
    during: Callable[[Job, Path], None] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    writes: str = ""


CASES = {
    "all ranks, in the data": Case([*BRIEF, "--csv=one_class.csv"], "one_class.csv"),
    "all ranks, in the backward pass": Case(
        [*BRIEF, "--model=xlnet", "--output_dir=run"], "add --ddp_find_unused_parameters", writes="run"
    ),
    "all ranks, in a step that cannot be trained": Case(
        [*TINY, *NOT_FINITE], "the optimizer skipped this step", "trainer_run", ranks=1, rank_status=1, writes="run"
    ),
    "all ranks of the page": Case(["--csv=nope.csv"], "nope.csv: no such file", "minimal"),
    "all ranks, with a debug level that crashes torch": Case(
        BRIEF, "TORCH_DISTRIBUTED_DEBUG=DETAIL", environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    ),
    "a rank without a GPU": Case(ON_GPUS, "rank(s) 1 (", FAULTY, environment={"GPUS": "2,0"}),
    "a node with too few GPUs": Case(ON_GPUS, "has 1 GPU(s)", FAULTY, environment={"GPUS": "1,1"}),
    "a rank with another flag": Case(
        ON_GPUS, "rank 1: unknown argument --lerning_rate", FAULTY, environment={"GPUS": "2,2", "UNKNOWN_FLAG_ON": "1"}
    ),
    "a frozen rank": Case(
        *(ENDLESS, "rank 0 lost contact with rank(s) 1, after step"),
        **{"ranks": 3, "rank_status": None, "during": freeze_rank_1, "writes": "run"},
    ),
}


@pytest.mark.parametrize("name", slow_after(1, CASES))
def test_a_job_that_fails_prints_one_line(name, tmp_path):
    case = CASES[name]
    write_inputs(tmp_path, tmp_path)
    for name in ("bert", "xlnet"):  # xlnet has parameters without a gradient
        write_model(tmp_path / name, name)
    before = set(tmp_path.iterdir())
    with Job(case.program, *case.flags, cwd=tmp_path, ranks=case.ranks, **case.environment) as job:
        if case.during:
            case.during(job, tmp_path)
        done = job.finish(120)
    assert done.status == 1, done.err
    (line,) = done.error_lines
    assert case.line in line
    if case.rank_status is not None:
        assert f"exitcode  : {case.rank_status}" in done.err
    assert "Traceback" not in done.err.partition("error: ")[0]
    assert {path.name for path in set(tmp_path.iterdir()) - before} <= {"cache", case.writes}


# ---- mistakes of any rank, raised on all ----------------------------------------------------------------------------

# One of each kind; tests/launched/test_user_mistakes.py has all of one process.
MISTAKES = {
    "--lerning_rate=1": "did you mean --learning_rate",
    "--csv=one_class.csv": "one_class.csv",
    "--train_batch_size=30": "--train_batch_size 30",
    "--output_dir=full": "full",
    # of some ranks
    "--csv=other-rows-{rank}.csv": "rank 2 has rows with the fingerprint ",
    "--csv=missing-on-one-{rank}.csv": "rank 1: ",
    "--learning_rate=0.00{rank}1": "--learning_rate 0.0011 (rank 0: 0.0001)",
}
# A rank that did not raise the error would be waited for.
SHARED_RUNS = {
    "four_ranks": {
        f"{number}-{path}": TrainingRun(path, [*BRIEF, flag]) for number, flag in enumerate(MISTAKES) for path in PATHS
    }
}


def write_inputs(folder: Path, csv: Path) -> None:
    (folder / "full").mkdir()
    (folder / "full" / "something").touch()
    pd.DataFrame({"label": [1] * 9, "review": ["好"] * 9}).to_csv(folder / "one_class.csv", index=False)
    write_reviews(folder / "reviews.csv", 90)
    for rank in range(4):
        write_reviews(folder / f"other-rows-{rank}.csv", 90 if rank != 2 else 91)
        if rank != 1:
            write_reviews(folder / f"missing-on-one-{rank}.csv", 90)


def test_a_mistake_on_any_rank_is_raised_on_all_and_leaves_nothing(trained_by, shared_folder, tmp_path, hotel_csv):
    outcomes = trained_by("four_ranks")
    for number, named in enumerate(MISTAKES.values()):
        for path in PATHS:
            (problem,) = str(outcomes[f"{number}-{path}"].problem).splitlines()
            assert problem.startswith(("AgreedError: ", "UserError: "))
            assert named in problem
    write_inputs(tmp_path, hotel_csv)
    inputs = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}
    paths = {path.relative_to(shared_folder) for path in shared_folder.rglob("*")}
    assert {path.parts[0] for path in paths - inputs} <= {"cache"}


# ---- a rank that is only late: no line -------------------------------------------------------------------------------

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


@pytest.mark.slow
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
