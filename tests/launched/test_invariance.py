"""Without dropout, any number of ranks is the same training: that of a plain loop in one process."""

from __future__ import annotations

import pandas as pd
import pytest
import reference
from jobs import read_steps

from app.settings import Settings

pytestmark = [pytest.mark.launched, pytest.mark.timeout(400)]
STEPS = 100
# What is left over a hundred steps is rounding: other sizes of matrices, another order of sums.
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-4}
RECIPE = {"max_steps": STEPS, "train_batch_size": 24, "max_length": 32, "dropout": 0.0}


def largest_relative_difference(ours: list[float], theirs: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("precision", ["fp64", pytest.param("fp32", marks=pytest.mark.slow)])
def test_no_torchrun_and_1_to_4_ranks_train_like_a_plain_loop(launch, hotel_csv, tmp_path, precision):
    recipe = RECIPE | {"csv": str(hotel_csv), "precision": precision, "train_sampling_strategy": "random"}
    places = [("ddp_loop", ranks) for ranks in range(5)]  # 0: plain python
    places += [("trainer_run", 2)] * (precision == "fp64")
    losses, predicted = {}, {}
    losses["reference"], predicted["reference"] = reference.train_plainly(Settings(**recipe))
    for road, ranks in places:
        flags = [f"--{name}={value}" for name, value in recipe.items()]
        flags += ["--eval_strategy=no", "--save_strategy=no", "--disable_tqdm", f"--output_dir={road}-{ranks}"]
        done = launch(f"app.{road}", *flags, ranks=ranks)
        assert done.status == 0, done.err
        folder = tmp_path / f"{road}-{ranks}"
        losses[road, ranks] = [step["loss"] for step in read_steps(folder)]
        predicted[road, ranks] = pd.read_csv(folder / "predictions.csv")["predicted"].tolist()

    differences = {
        (a, b): largest_relative_difference(losses[a], losses[b]) for a in losses for b in losses if str(a) < str(b)
    }
    print(f"{precision}: largest relative difference {max(differences.values()):.1e} of {len(losses)} runs")
    assert len(losses["reference"]) == STEPS
    assert losses["reference"][-1] < losses["reference"][0], "it must have learned something to be worth comparing"
    assert len(set(predicted["reference"])) == 2
    assert {pair: found for pair, found in differences.items() if not found <= TOLERANCE[precision]} == {}
    assert {place: rows == predicted["reference"] for place, rows in predicted.items()} == dict.fromkeys(
        predicted, True
    )
