"""Law 7: app/minimal.py trains bitwise like app.ddp_loop, at any number of ranks."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.jobs import Job, Outcome, TrainingRun, read_steps, require_success, write_subset
from helpers.marks import slow_after
from launched.shared_jobs import SharedRuns

pytestmark = pytest.mark.launched
SAME = ["--train_sampling_strategy=random", "--gradient_accumulation_steps=2", "--save_strategy=no"]
SAME += ["--eval_strategy=no"]
SIX_STEPS = ["--csv=few.csv", "--max_steps=6"]  # of two epochs with 4 steps each
CASES = {  # by job: ranks and flags
    "two_ranks": (2, SIX_STEPS),
    "one_rank": (0, ["--csv=all.csv", "--max_steps=8"]),  # without torchrun
    "four_ranks": (4, SIX_STEPS),
    "three_ranks": (3, ["--csv=few.csv", "--train_batch_size=96"]),  # the default epochs, and sums that 3 divides
}
RUNS: SharedRuns = {job: {job: TrainingRun("ddp_loop", [*flags, *SAME])} for job, (_, flags) in CASES.items()}
SHARED_RUNS, SLOW_SHARED_RUNS = {"two_ranks": RUNS["two_ranks"]}, RUNS


def write_inputs(folder: Path, csv: Path) -> None:
    write_subset(csv, folder / "few.csv", 150)
    shutil.copy(csv, folder / "all.csv")


@pytest.mark.parametrize("job", slow_after(1, CASES))
def test_losses_norms_weights_and_accuracy_are_bitwise_those_of_ddp_loop(
    trained_by: Callable[[str], dict[str, Outcome]], shared_folder: Path, job: str
) -> None:
    ranks, flags = CASES[job]
    require_success({job: trained_by(job)[job]})
    run = shared_folder / job
    expected = read_steps(run)
    with Job("app.minimal", *flags, cwd=shared_folder, ranks=ranks) as page:
        done = page.finish()
    assert done.status == 0, done.err
    *steps, result = map(json.loads, done.out.splitlines())

    assert job == "one_rank" or expected[-1]["epoch"] > 1, "the order of the second epoch has to be compared"
    assert any(step["grad_norm"] > 1 for step in expected), "a gradient has to be clipped"
    assert steps == [{name: step[name] for name in ("step", "loss", "grad_norm")} for step in expected]
    accuracy = json.loads((run / "metrics.json").read_text())["accuracy"]
    weights = hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()
    assert result == {"accuracy": accuracy, "weights": weights}
