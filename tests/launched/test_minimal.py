"""Law 7: app/minimal.py trains bitwise like app.ddp_loop, at any number of ranks."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from helpers.jobs import PROJECT, Job, Outcome, TrainingRun, read_steps, require_success, write_subset
from helpers.shared_jobs import SharedRuns

pytestmark = pytest.mark.launched
SAME = [
    "--train_sampling_strategy=random",
    "--gradient_accumulation_steps=2",
    "--save_strategy=no",
    "--eval_strategy=no",
]
ALL = 0  # rows

CASES = {  # job, ranks, rows of the CSV, and flags
    "two": ("two_ranks", 2, 150, ["--max_steps=6"]),  # 4 steps per epoch
    "one, on the whole CSV": ("one_rank", 1, ALL, ["--max_steps=8"]),
    "four": ("four_ranks", 4, 150, ["--max_steps=6"]),
    "three": ("three_ranks", 3, 150, ["--train_batch_size=24"]),  # 3 epochs, and sums that 3 divides
}
FAST = ("two",)


def write_inputs(folder: Path, csv: Path) -> None:
    write_subset(csv, folder / "reviews-150.csv", 150)
    shutil.copy(csv, folder / f"reviews-{ALL}.csv")


def shared_runs(cases: Iterable[str]) -> SharedRuns:
    runs: SharedRuns = {}
    for case in cases:
        job, _, rows, flags = CASES[case]
        runs.setdefault(job, {})[case] = TrainingRun("ddp_loop", [f"--csv=reviews-{rows}.csv", *flags, *SAME])
    return runs


SHARED_RUNS = shared_runs(FAST)
SLOW_SHARED_RUNS = shared_runs(CASES.keys() - FAST)


@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_losses_norms_weights_and_accuracy_are_bitwise_those_of_ddp_loop(
    trained_by: Callable[[str], dict[str, Outcome]], shared_folder: Path, case: str
) -> None:
    job, ranks, rows, flags = CASES[case]
    require_success({case: trained_by(job)[case]})
    run = shared_folder / case
    flags = [f"--csv=reviews-{rows}.csv", *flags]
    expected = read_steps(run)
    # A single rank needs no torchrun.
    with Job("app.minimal", *flags, cwd=shared_folder, ranks=ranks if ranks > 1 else 0) as job:
        done = job.finish()
    assert done.status == 0, done.err
    *steps, result = map(json.loads, done.out.splitlines())

    assert rows == ALL or expected[-1]["epoch"] > 1, "the order of the second epoch has to be compared"
    assert any(step["grad_norm"] > 1 for step in expected), "a gradient has to be clipped"
    assert steps == [{name: step[name] for name in ("step", "loss", "grad_norm")} for step in expected]
    accuracy = json.loads((run / "metrics.json").read_text())["accuracy"]
    weights = hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()
    assert result == {"accuracy": accuracy, "weights": weights}


def test_the_page_has_at_most_120_lines():
    assert len((PROJECT / "app" / "minimal.py").read_text().splitlines()) <= 120
