"""Without logical ranks: both paths are bitwise identical, and an evaluation counts each row once, even on 3 ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from helpers.jobs import TrainingRun, require_success, write_subset
from helpers.shared_jobs import SharedRuns
from sklearn.metrics import accuracy_score

from app.report.bitwise import first_difference
from app.runs.reader import read_run

PATHS = ("ddp_loop", "trainer_run")
CELLS = ["1,2,random,fp32", "2,4,group_by_length,fp32", "3,2,random,fp32", "3,1,group_by_length,bf16"]
ROWS = 301  # 31 test rows, which neither 2 nor 3 ranks can share equally; 202 training rows, 8 batches of 24
FLAGS = ["--csv=reviews.csv", "--train_batch_size=24", "--validation_size=0.25", "--num_train_epochs=3"]
FLAGS += ["--max_length=16", "--dropout=0.1", "--save_strategy=no", "--eval_strategy=steps", "--eval_steps=5"]


JOB = {"1": "one_rank", "2": "two_ranks", "3": "three_ranks"}
SHARED_RUNS: SharedRuns = {}
SLOW_SHARED_RUNS: SharedRuns = {job: {} for job in JOB.values()}
for cell in CELLS:
    size, accumulation, sampling, precision = cell.split(",")
    flags = [*FLAGS, f"--gradient_accumulation_steps={accumulation}", f"--precision={precision}"]
    flags += [f"--train_sampling_strategy={sampling}"]
    SLOW_SHARED_RUNS[JOB[size]] |= {f"{cell}-{path}": TrainingRun(path, flags) for path in PATHS}


def write_inputs(folder: Path, csv: Path) -> None:
    write_subset(csv, folder / "reviews.csv", ROWS)


@pytest.fixture(scope="module")
def trained(trained_by, shared_folder) -> Callable[[str], Path]:
    """A function that trains all cells of a number of ranks, and returns the folder of all cells."""

    def train(ranks: str) -> Path:
        require_success(trained_by(JOB[ranks]))
        return shared_folder

    return train


@pytest.mark.slow
@pytest.mark.launched
@pytest.mark.parametrize("cell", CELLS)
def test_both_paths_are_bitwise_identical(trained, cell):
    ranks, accumulation, sampling, precision = cell.split(",")
    a, b = (read_run(trained(ranks) / f"{cell}-{path}") for path in PATHS)
    for run, path in zip((a, b), PATHS, strict=True):
        assert (run.settings["path"], run.settings["world_size"], run.settings["dropout"]) == (path, int(ranks), 0.1)
        assert run.settings["gradient_accumulation_steps"] == int(accumulation)
        assert (run.settings["train_sampling_strategy"], run.settings["precision"]) == (sampling, precision)
    assert first_difference(a, b) is None
    assert a.evaluations == b.evaluations
    assert len(a.steps) == 24
    assert a.steps[-1]["epoch"] == 3
    for file in ("predictions.csv", "model/model.safetensors", "split.json"):
        assert (a.folder / file).read_bytes() == (b.folder / file).read_bytes(), file


@pytest.mark.slow
@pytest.mark.launched
@pytest.mark.parametrize("cell", ["1,2,random,fp32", "2,4,group_by_length,fp32", "3,2,random,fp32"])
@pytest.mark.parametrize("path", PATHS)
def test_each_test_row_is_predicted_once_and_scored_as_scikit_learn_does(trained, cell, path):
    folder = trained(cell[0])
    run = folder / f"{cell}-{path}"
    assert {file.name for file in run.iterdir()} - {"checkpoints", ".lock"} == {
        *("settings.json", "split.json", "steps.jsonl", "evaluations.jsonl", "metrics.json", "predictions.csv"),
        "model",
    }
    metrics, split = (json.loads((run / f"{name}.json").read_text()) for name in ("metrics", "split"))
    predictions, source = pd.read_csv(run / "predictions.csv"), pd.read_csv(folder / "reviews.csv")
    n_test = math.ceil(ROWS * 0.1)  # --test_size
    assert len(predictions) == predictions["row"].nunique() == metrics["n_test"] == split["n_test"] == n_test
    assert predictions["row"].is_monotonic_increasing
    assert metrics["accuracy"] == accuracy_score(predictions["label"], predictions["predicted"])
    assert (source["label"].loc[predictions["row"]].to_numpy() == predictions["label"].to_numpy()).all()
    assert len(metrics["peak_memory_bytes"]) == int(cell[0])


@pytest.mark.slow
@pytest.mark.launched
def test_same_bits_trains_both_paths(launch, hotel_csv, tmp_path):
    write_subset(hotel_csv, tmp_path / "reviews.csv", 1000)
    flags = ["--logical_ranks", 2, "--ranks", 2, "--strategies", "ddp", "--interruptions", "uninterrupted"]
    flags += ["--max_steps", 20, "--eval_steps", 15, "--train_batch_size", 48]
    done = launch("app.experiments.same_bits", "--csv", "reviews.csv", *flags, "--output_dir", "table", limit=500)
    assert done.status == 0, done.out + done.err
    table = (tmp_path / "table" / "same_bits.md").read_text()
    assert table in done.out
    assert "all 2 cells have one hash: bitwise identical\n" in table
    for path in PATHS:
        run = read_run(tmp_path / "table" / f"{path}-2-ddp")
        assert (run.settings["path"], run.settings["world_size"], run.settings["logical_ranks"]) == (path, 2, 2)
        assert len(run.steps) == 20
        assert [line["step"] for line in run.evaluations] == [15, 20]
