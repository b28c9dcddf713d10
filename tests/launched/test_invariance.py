"""Without dropout, training at any number of ranks is the same as a plain loop in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
from helpers import reference
from helpers.jobs import TrainingRun, read_steps, require_success, run_many, write_subset

from app.settings import Settings

pytestmark = [pytest.mark.launched, pytest.mark.slow]
# 0 stands for plain Python without torchrun.
RANKS = (0, 2, 3, 4)
RUNS = [
    *((ranks, "ddp_loop", precision) for ranks in RANKS for precision in ("fp64", "fp32")),
    (2, "trainer_run", "fp64"),  # test_same_bits.py proves that both paths are equal
]
ROWS = 1000
STEPS = 80  # two epochs of 37 batches, and some of the next
# The largest relative difference of two losses: rounding adds up over the steps, because matrices have other sizes and
# sums another order.
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-4}
RECIPE = {"max_steps": STEPS, "train_batch_size": 24, "max_length": 32, "dropout": 0.0}
RECIPE |= {"train_sampling_strategy": "random"}


@pytest.fixture(scope="module")
def folder(hotel_csv, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("invariance")
    write_subset(hotel_csv, folder / "reviews.csv", ROWS)
    return folder


@pytest.fixture(scope="module")
def trained(folder) -> Callable[[int], Path]:
    """A function that trains with a number of ranks, and returns the folder of the runs RANKS-PATH-PRECISION."""

    @cache
    def train(ranks: int) -> Path:
        common = [f"--{name}={value}" for name, value in RECIPE.items()]
        common += ["--csv=reviews.csv", "--eval_strategy=no", "--save_strategy=no"]
        runs = {
            f"{ranks}-{path}-{precision}": TrainingRun(path, [*common, f"--precision={precision}"])
            for ranks_of_run, path, precision in RUNS
            if ranks_of_run == ranks
        }
        require_success(run_many(folder, runs, ranks))
        return folder

    return train


@pytest.fixture(scope="module")
def plain_loop(folder) -> Callable[[str], tuple[list[float], list[int]]]:
    """A function that returns the losses and predicted classes of the plain loop in a precision."""

    @cache
    def train(precision: str) -> tuple[list[float], list[int]]:
        settings = Settings(**RECIPE, csv=str(folder / "reviews.csv"), precision=precision)
        return reference.train_plainly(settings)

    return train


@pytest.mark.parametrize(("ranks", "path", "precision"), RUNS)
def test_any_number_of_ranks_trains_like_a_plain_loop(trained, plain_loop, ranks, path, precision):
    losses, predicted = plain_loop(precision)
    assert len(losses) == STEPS
    assert losses[-1] < losses[0], "the model must have learned something"
    assert len(set(predicted)) == 2
    run = trained(ranks) / f"{ranks}-{path}-{precision}"
    found = [step["loss"] for step in read_steps(run)]
    difference = max(abs(x - y) / abs(y) for x, y in zip(found, losses, strict=True))
    print(f"{path}, {ranks} ranks, {precision}: largest relative difference of a loss {difference:.1e}")
    assert difference <= TOLERANCE[precision] / 2  # then any two runs differ by at most the tolerance
    assert pd.read_csv(run / "predictions.csv")["predicted"].tolist() == predicted


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_any_number_of_ranks_trains_on_the_same_batches(trained, ranks):
    names = ("step", "epoch", "examples", "tokens", "learning_rate")
    expected = read_steps(trained(0) / "0-ddp_loop-fp64")
    assert len({step["tokens"] for step in expected}) > 1
    for ours, theirs in zip(read_steps(trained(ranks) / f"{ranks}-ddp_loop-fp64"), expected, strict=True):
        assert [ours[name] for name in names] == [theirs[name] for name in names]
        assert math.isclose(ours["grad_norm"], theirs["grad_norm"], rel_tol=1e-6)
