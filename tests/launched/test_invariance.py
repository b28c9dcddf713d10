"""Without dropout, training at any number of ranks is the same as a plain loop in one process."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest
import reference
from jobs import TrainingRun, read_steps, require_success, run_many, write_subset

from app.settings import Settings

pytestmark = pytest.mark.launched
STEPS = 40  # two epochs of 18 training batches, and a few more
ROWS = 500
# Rounding adds up over the steps: other sizes of matrices, another order of sums.
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-4}
RECIPE = {"csv": "reviews.csv", "max_steps": STEPS, "train_batch_size": 24, "max_length": 32, "dropout": 0.0}
RECIPE |= {"train_sampling_strategy": "random"}


def flags_of(**settings) -> list[str]:
    return [f"--{name}={value}" for name, value in settings.items()]


@pytest.fixture(scope="module")
def folder(hotel_csv, tmp_path_factory) -> Path:
    """The folder of the runs PATH-RANKS-PRECISION, where 0 ranks stand for plain Python without torchrun."""
    folder = tmp_path_factory.mktemp("invariance")
    write_subset(hotel_csv, folder / "reviews.csv", ROWS)
    for ranks in range(5):
        runs = {
            f"{path}-{ranks}-{precision}": TrainingRun(
                path, flags_of(**RECIPE, precision=precision, eval_strategy="no", save_strategy="no")
            )
            for precision in TOLERANCE
            for path in ("ddp_loop", "trainer_run")
        }
        require_success(run_many(folder, runs, ranks))
    return folder


@pytest.mark.parametrize("precision", TOLERANCE)
def test_plain_python_and_1_to_4_ranks_train_like_a_plain_loop(folder, precision):
    losses, predicted = {}, {}
    settings = Settings(**RECIPE | {"csv": str(folder / "reviews.csv"), "precision": precision})
    losses["reference"], predicted["reference"] = reference.train_plainly(settings)
    for ranks in range(5):
        for path in ("ddp_loop", "trainer_run"):
            run = folder / f"{path}-{ranks}-{precision}"
            losses[run.name] = [step["loss"] for step in read_steps(run)]
            predicted[run.name] = pd.read_csv(run / "predictions.csv")["predicted"].tolist()

    differences = {
        (a, b): max(abs(x - y) / abs(y) for x, y in zip(losses[a], losses[b], strict=True))
        for a in losses
        for b in losses
        if a < b
    }
    print(f"{precision}: largest relative difference {max(differences.values()):.1e} of {len(losses)} runs")
    assert len(losses["reference"]) == STEPS
    assert losses["reference"][-1] < losses["reference"][0], "the model must have learned something"
    assert len(set(predicted["reference"])) == 2
    assert {pair: found for pair, found in differences.items() if not found <= TOLERANCE[precision]} == {}
    assert {run: rows == predicted["reference"] for run, rows in predicted.items()} == dict.fromkeys(predicted, True)


def test_every_number_of_ranks_trains_on_the_same_batches(folder):
    expected = read_steps(folder / "ddp_loop-0-fp32")
    assert len({step["tokens"] for step in expected}) > 1
    for ranks in range(1, 5):
        for path in ("ddp_loop", "trainer_run"):
            for ours, theirs in zip(read_steps(folder / f"{path}-{ranks}-fp32"), expected, strict=True):
                assert [ours[name] for name in ("step", "epoch", "examples", "tokens", "learning_rate")] == [
                    theirs[name] for name in ("step", "epoch", "examples", "tokens", "learning_rate")
                ]
                assert math.isclose(ours["grad_norm"], theirs["grad_norm"], rel_tol=1e-2)
