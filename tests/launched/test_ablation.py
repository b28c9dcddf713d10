"""`python -m app.compare --ablate` as a user starts it, and that its recipe without a change is app.ddp_loop."""

from __future__ import annotations

import json
from dataclasses import asdict

import pandas as pd
import pytest
from jobs import SAMPLE_CSV, read_steps

from app.experiments.ablation_variants import Variant

pytestmark = pytest.mark.launched
# More steps than an epoch has, micro-batches, and dropout.
FLAGS = ["--csv", SAMPLE_CSV, "--max_length", 16, "--train_batch_size", 96, "--gradient_accumulation_steps", 2]
FLAGS += ["--max_steps", 30, "--threads", 1, "--disable_tqdm"]

EMULATION = """
import json, sys
from app.cli import launch
from app.distributed.process_group import join
from app.experiments.ablation import prepare_data, train_variant
from app.experiments.ablation_variants import Variant

def main(settings):
    with join(settings) as world:
        data = prepare_data(settings, Variant(), 2, world)
        outcome = train_variant(settings, Variant(), data, 2, world)
    json.dump({"losses": outcome.losses, "correct": outcome.correct.tolist()}, open("outcome.json", "w"))

launch(main, None)
"""


def test_ranks_that_take_turns_train_like_ranks_that_are_there(launch, tmp_path):
    (tmp_path / "emulation.py").write_text(EMULATION)
    for done in (
        launch("app.ddp_loop", *FLAGS, "--eval_strategy", "no", "--output_dir", "run", ranks=2),
        launch(str(tmp_path / "emulation.py"), *FLAGS),
    ):
        assert done.status == 0, done.err
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    steps = read_steps(tmp_path / "run")
    assert steps[-1]["epoch"] > 1
    assert outcome["losses"] == pytest.approx([step["loss"] for step in steps], rel=1e-6)
    predictions = pd.read_csv(tmp_path / "run" / "predictions.csv")
    assert outcome["correct"] == (predictions["label"] == predictions["predicted"]).tolist()


def test_the_table_shows_what_must_differ_and_what_can_t(launch, tmp_path):
    done = launch("app.compare", "--ablate", "--seeds", 1, *FLAGS, "--max_steps", 4, "--output_dir", "out")
    assert done.status == 0, done.err
    assert (tmp_path / "out" / "ablation.md").read_text() in done.out
    ablation = json.loads((tmp_path / "out" / "ablation.json").read_text())
    assert len(ablation["differences"]) == 7
    by_change = {changed(row["recipe"]): row for row in ablation["differences"]}
    assert by_change["counted_ranks"]["max_loss_difference"] == 0
    assert by_change["counted_ranks"]["counted_rows"] == -(-ablation["n_test"] // 8) * 8
    inflated = by_change["inflation"]
    assert inflated["recipe"]["inflation"] == 4, "2 ranks x 2 accumulation steps"
    # A loss near ln 2 that is logged four times too large.
    assert inflated["max_loss_difference"] == pytest.approx(3 * 0.69, abs=0.15)
    assert by_change["optimizer"]["first_differing_steps"] == [2], "the weights before the first step are the same"
    for change in ("dropout_seed", "split", "batch_factor"):
        assert by_change[change]["first_differing_steps"] == [1], change
    # Other dropout masks from the first batch on that has no review of the greatest length.
    assert 0 < by_change["padding"]["max_loss_difference"] < 0.1


def changed(recipe):
    (name,) = (name for name, value in asdict(Variant()).items() if recipe[name] != value)
    return name


@pytest.mark.parametrize("flags", [["a", "b"], ["--assert_equal"], ["--seeds", 0], ["--train_batch_size", 33]])
def test_a_wrong_call_is_one_line(launch, tmp_path, flags):
    done = launch("app.compare", "--ablate", "--csv", SAMPLE_CSV, *flags)
    assert done.status == 2
    assert done.err.splitlines() == done.error_lines
    assert len(done.error_lines) == 1
    assert not (tmp_path / "runs" / "ablations").exists()
