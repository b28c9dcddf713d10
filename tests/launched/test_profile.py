"""`--profile` with two ranks: it changes no result, and every rank writes its trace.

tests/profiling has one rank, both kinds of strategies and the arithmetic of the summary.
"""

from __future__ import annotations

import gzip
import json

import pytest
from helpers.jobs import TrainingRun, require_success, write_subset
from launched.shared_jobs import SharedRuns

from app.report.bitwise import first_difference
from app.runs.reader import read_run

FLAGS = ["--csv=reviews.csv", "--train_batch_size=16", "--max_length=16", "--dropout=0.1", "--max_steps=9"]
FLAGS += ["--eval_strategy=steps", "--eval_steps=6", "--save_strategy=no"]  # the evaluation is between profiled steps
FLAGS += ["--strategy=zero3", "--gradient_accumulation_steps=2"]
RUNS = {"plain": TrainingRun("ddp_loop", FLAGS), "profiled": TrainingRun("trainer_run", [*FLAGS, "--profile=3"])}
SHARED_RUNS: SharedRuns = {"two_ranks": RUNS}


def write_inputs(folder, csv):
    write_subset(csv, folder / "reviews.csv", 201)


@pytest.mark.launched
@pytest.mark.slow
def test_a_profile_has_the_steps_of_every_rank_and_changes_no_result(trained_by, shared_folder):
    require_success(trained_by("two_ranks"))
    run, plain = shared_folder / "profiled", shared_folder / "plain"
    assert first_difference(read_run(run), read_run(plain)) is None
    assert (run / "evaluations.jsonl").read_bytes() == (plain / "evaluations.jsonl").read_bytes()
    assert {file.name for file in (run / "profile").iterdir()} == {
        *("trace-rank0.json.gz", "trace-rank1.json.gz", "summary.json", "summary.md")
    }
    summary = json.loads((run / "profile" / "summary.json").read_text())
    assert summary["steps"] == [5, 6, 7]
    assert [len(steps) for steps in summary["ranks"]] == [3, 3]
    for rank in range(2):
        with gzip.open(run / "profile" / f"trace-rank{rank}.json.gz") as file:
            trace = json.load(file)
        assert trace["distributedInfo"]["rank"] == rank
        names = [event["name"] for event in trace["traceEvents"]]
        assert len([name for name in names if name.startswith("gloo:")]) >= 3
        # With two micro-batches per step, the trace has those of these three steps and of nothing else.
        assert names.count("micro-batch") == 6
