"""Runs on two ranks that are observed: `--profile` and TensorBoard change no result, and get all that they should.

tests/profiling has one rank, both kinds of strategies and the arithmetic of the summary; tests/record has trackers that
fail.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path

import pytest
from helpers.jobs import TrainingRun, read_steps, require_success, unavailable, write_subset
from launched.shared_jobs import SharedRuns

from app.runs.hashes import hash_results
from app.runs.reader import read_run
from app.runs.schema import TRACKERS

pytestmark = [pytest.mark.launched, pytest.mark.slow]
FLAGS = ["--csv=reviews.csv", "--train_batch_size=16", "--max_length=16", "--dropout=0.1", "--max_steps=9"]
FLAGS += ["--eval_strategy=steps", "--eval_steps=6", "--save_strategy=no"]  # the evaluation is between profiled steps
FLAGS += ["--strategy=zero3", "--gradient_accumulation_steps=2", "--logging_steps=4"]
OBSERVED = TrainingRun("trainer_run", [*FLAGS, "--profile=3", "--report_to=tensorboard"])
SHARED_RUNS: SharedRuns = {"two_ranks": {"plain": TrainingRun("ddp_loop", FLAGS), "observed": OBSERVED}}


def write_inputs(folder, csv):
    write_subset(csv, folder / "reviews.csv", 201)


@pytest.fixture
def observed(trained_by, shared_folder) -> Path:
    """The folder of the observed run, which has the results of the plain one."""
    if importlib.util.find_spec("tensorboard") is None:
        unavailable("TensorBoard is not installed: run bash run_scripts/setup.sh")
    require_success(trained_by("two_ranks"))
    assert hash_results(shared_folder / "observed") == hash_results(shared_folder / "plain")
    return shared_folder / "observed"


def test_a_profile_has_the_steps_of_every_rank(observed):
    profile = observed / "profile"
    assert {file.name for file in profile.iterdir()} == {
        *("trace-rank0.json.gz", "trace-rank1.json.gz", "summary.json", "summary.md")
    }
    summary = json.loads((profile / "summary.json").read_text())
    assert summary["steps"] == [5, 6, 7]
    assert [len(steps) for steps in summary["ranks"]] == [3, 3]
    for rank in range(2):
        with gzip.open(profile / f"trace-rank{rank}.json.gz") as file:
            trace = json.load(file)
        assert trace["distributedInfo"]["rank"] == rank
        names = [event["name"] for event in trace["traceEvents"]]
        assert len([name for name in names if name.startswith("gloo:")]) >= 3
        # With two micro-batches per step, the trace has those of these three steps and of nothing else.
        assert names.count("micro-batch") == 6


def test_tensorboard_gets_each_value_once_and_in_full_precision(observed):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    logged = {}
    for file in (observed / TRACKERS / "tensorboard").glob("events.*"):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.tag.startswith(("train/", "eval/", "final/")):
                    assert (value.tag, event.step) not in logged, "logged twice"
                    logged[value.tag, event.step] = make_ndarray(value.tensor).item()
    for step in read_steps(observed):
        number = step.pop("step")
        assert {name: logged[f"train/{name}", number] for name in step} == step
    assert logged["eval/accuracy", 9] == read_run(observed).metrics["accuracy"] == logged["final/accuracy", 9]
