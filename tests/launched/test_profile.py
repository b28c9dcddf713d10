"""`--profile` with two ranks, in both paths: it changes no result, and every rank writes its trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from helpers.jobs import TrainingRun, require_success, write_subset
from launched.shared_jobs import SharedRuns

from app.profiling.breakdown import CATEGORIES
from app.report.bitwise import first_difference
from app.runs.reader import read_run

PATHS = ("trainer_run", "ddp_loop")
FLAGS = ["--csv=reviews.csv", "--train_batch_size=16", "--max_length=16", "--dropout=0.1", "--max_steps=9"]
FLAGS += ["--eval_strategy=steps", "--eval_steps=6", "--save_strategy=no"]  # the evaluation is between profiled steps
STRATEGIES = {"ddp": ["--gradient_accumulation_steps=2"], "zero3": ["--strategy=zero3", "--logical_ranks=4"]}


CASES = list(zip(PATHS, STRATEGIES, strict=True))
RUNS = {}
for path, name in CASES:
    RUNS[f"plain-{name}"] = TrainingRun("ddp_loop", [*FLAGS, *STRATEGIES[name]])
    RUNS[f"{path}-{name}"] = TrainingRun(path, [*FLAGS, *STRATEGIES[name], "--profile=3"])
SHARED_RUNS: SharedRuns = {}
SLOW_SHARED_RUNS = {"two_ranks": RUNS}


def write_inputs(folder: Path, csv: Path) -> None:
    write_subset(csv, folder / "reviews.csv", 201)


@pytest.fixture(scope="module")
def folder(trained_by, shared_folder) -> Path:
    require_success(trained_by("two_ranks"))
    return shared_folder


@pytest.mark.launched
@pytest.mark.slow
@pytest.mark.parametrize(("path", "strategy"), CASES)
def test_a_profile_divides_the_steps_of_every_rank_and_changes_no_result(folder, path, strategy):
    run, plain = folder / f"{path}-{strategy}", folder / f"plain-{strategy}"
    assert first_difference(read_run(run), read_run(plain)) is None
    assert (run / "evaluations.jsonl").read_bytes() == (plain / "evaluations.jsonl").read_bytes()
    assert {file.name for file in (run / "profile").iterdir()} == {
        *("trace-rank0.json.gz", "trace-rank1.json.gz", "summary.json", "summary.md")
    }
    summary = json.loads((run / "profile" / "summary.json").read_text())
    assert summary["steps"] == [5, 6, 7]
    assert [len(steps) for steps in summary["ranks"]] == [3, 3]
    for rank, steps in enumerate(summary["ranks"]):
        for step in steps:
            assert sum(step[name] for name in CATEGORIES) == pytest.approx(step["step"])
            assert min(step[name] for name in CATEGORIES) > 0
            assert step["communication"] <= step["step"]
        with gzip.open(run / "profile" / f"trace-rank{rank}.json.gz") as file:
            trace = json.load(file)
        assert trace["distributedInfo"]["rank"] == rank
        names = [event["name"] for event in trace["traceEvents"]]
        assert len([name for name in names if name.startswith("gloo:")]) >= 3
        # With two micro-batches per step, the trace has those of these three steps and of nothing else.
        assert len([event for event in trace["traceEvents"] if event["name"] == "micro-batch"]) == 6
