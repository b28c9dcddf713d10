"""Training at any number of ranks is the same as a plain loop in one process, with dropout, up to rounding.

That both paths are equal is proven in test_laws.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers import reference
from helpers.jobs import TrainingRun, read_steps, require_success, write_subset
from helpers.shared_jobs import SharedRuns

from app.settings import Settings

pytestmark = [pytest.mark.launched, pytest.mark.slow]
# 0 stands for plain Python without torchrun.
RANKS = (0, 2, 3, 4)
RUNS = [*((ranks, "ddp_loop", "fp64", "plain") for ranks in RANKS)]
RUNS += [*((ranks, "ddp_loop", "fp32", "plain") for ranks in (0, 3))]
RUNS += [(2, "ddp_loop", "fp64", "weighted"), (4, "trainer_run", "fp64", "weighted")]
ROWS = 1000
STEPS = 80  # two epochs of 37 batches, and some of the next
# The largest relative difference of two losses: rounding adds up over the steps, because matrices have other sizes and
# sums another order.
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-4}
RECIPE = {"max_steps": STEPS, "train_batch_size": 24, "max_length": 32, "dropout": 0.05}
RECIPE |= {"train_sampling_strategy": "random", "model": "tiny-bert"}


LOSSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "weighted": {"class_weights": "1.5,0.7", "label_smoothing_factor": 0.1, "gradient_accumulation_steps": 3},
}

COMMON = [*(f"--{name}={value}" for name, value in RECIPE.items()), "--csv=reviews.csv"]
COMMON += ["--eval_strategy=no", "--save_strategy=no"]
JOB = {0: "one_rank", 2: "two_ranks", 3: "three_ranks", 4: "four_ranks"}
SHARED_RUNS: SharedRuns = {}
SLOW_SHARED_RUNS: SharedRuns = {job: {} for job in JOB.values()}
for ranks, path, precision, loss in RUNS:
    name = f"{ranks}-{path}-{precision}-{loss}"
    flags = [f"--{setting}={value}" for setting, value in LOSSES[loss].items()]
    SLOW_SHARED_RUNS[JOB[ranks]][name] = TrainingRun(path, [*COMMON, *flags, f"--precision={precision}"])


def write_inputs(folder: Path, csv: Path) -> None:
    write_subset(csv, folder / "reviews.csv", ROWS)


@pytest.fixture(scope="module")
def trained(trained_by, shared_folder) -> Callable[[int], Path]:
    """A function that trains with a number of ranks, and returns the folder of the runs RANKS-PATH-PRECISION-LOSS."""

    def train(ranks: int) -> Path:
        require_success(trained_by(JOB[ranks]))
        return shared_folder

    return train


@pytest.fixture(scope="module")
def plain_loop(trained, shared_folder) -> Callable[[str, str], tuple[list[float], list[int]]]:
    """A function that returns the losses and predicted classes of the plain loop in a precision, with a loss."""

    trained(0)  # writes the reviews

    @cache
    def train(precision: str, loss: str) -> tuple[list[float], list[int]]:
        settings = Settings(**RECIPE, **LOSSES[loss], csv=str(shared_folder / "reviews.csv"), precision=precision)
        return reference.train_plainly(settings)

    return train


@pytest.mark.parametrize(("ranks", "path", "precision", "loss"), RUNS)
def test_any_number_of_ranks_trains_like_a_plain_loop(trained, plain_loop, ranks, path, precision, loss):
    losses, predicted = plain_loop(precision, loss)
    assert len(losses) == STEPS
    assert losses[-1] < losses[0], "the model must have learned something"
    assert len(set(predicted)) == 2
    run = trained(ranks) / f"{ranks}-{path}-{precision}-{loss}"
    found = [step["loss"] for step in read_steps(run)]
    difference = max(abs(x - y) / abs(y) for x, y in zip(found, losses, strict=True))
    print(f"{path}, {ranks} ranks, {precision}, {loss}: largest relative difference of a loss {difference:.1e}")
    assert difference <= TOLERANCE[precision] / 2  # then any two runs differ by at most the tolerance
    assert pd.read_csv(run / "predictions.csv")["predicted"].tolist() == predicted


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_any_number_of_ranks_trains_on_the_same_batches(trained, ranks):
    names = ("step", "epoch", "examples", "tokens", "learning_rate")
    expected = read_steps(trained(0) / "0-ddp_loop-fp64-plain")
    assert len({step["tokens"] for step in expected}) > 1
    for ours, theirs in zip(read_steps(trained(ranks) / f"{ranks}-ddp_loop-fp64-plain"), expected, strict=True):
        assert [ours[name] for name in names] == [theirs[name] for name in names]
        assert math.isclose(ours["grad_norm"], theirs["grad_norm"], rel_tol=1e-6)
