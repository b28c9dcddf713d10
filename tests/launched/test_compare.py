"""`python -m app.compare`: the remedy that it names, and --ablate, whose simulated ranks train as real ones do."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers.architectures import write_model
from helpers.jobs import SAMPLE_CSV, TrainingRun, read_steps, require_success

from app.cli import parse_settings
from app.compare import main
from app.experiments.ablation import train_variant
from app.experiments.variants import Variant
from app.program import run_program
from app.training.build import build_data

pytestmark = pytest.mark.launched
SMALL = ["--csv", SAMPLE_CSV, "--model=bert", "--max_length=32", "--max_steps=3", "--eval_strategy=no"]
SHARED_RUNS = {
    "one_rank": {
        "one": TrainingRun("trainer_run", [*SMALL, "--threads=2"]),  # another default of --logical_ranks
        "remedied": TrainingRun("trainer_run", [*SMALL, "--logical_ranks=2", "--threads=1"]),
    },
    "two_ranks": {"two": TrainingRun("ddp_loop", SMALL)},
}


def write_inputs(folder: Path, csv: Path) -> None:
    write_model(folder / "bert", "bert")  # the reviews are the bundled sample


def test_the_remedy_that_compare_names_makes_different_runs_identical(
    trained_by, shared_folder, tmp_path, monkeypatch, capsys
):
    """The default number of ranks under torchrun and with plain Python, and another number of threads."""

    def compare(*arguments: object) -> tuple[int, list[str]]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["compare", *map(str, arguments)])
        return run_program(main), capsys.readouterr().err.splitlines()

    for job in SHARED_RUNS:
        require_success(trained_by(job))
    two, one, remedied = (shared_folder / name for name in ("two", "one", "remedied"))
    status, (line,) = compare(two, one, "--assert_equal")
    assert status == 1
    assert re.match(r"not equal: step \d+: the loss is ", line)  # rounding: it may be equal in the first steps
    assert line.endswith(
        "; trained differently: ranks 2 and 1, logical ranks 2 and 1, threads 1 and 2; "
        "start both with --logical_ranks 2 --threads 1"
    )
    assert compare(two, remedied, "--assert_equal") == (0, [])
    assert not (tmp_path / "runs").exists(), "only a report needs a folder"
    assert compare(two, one, "--no_baselines", "--output_dir=report") == (0, []), "without --assert_equal"
    cause = line.partition("; trained differently: ")[2]
    assert f" on: {cause}.**" in (tmp_path / "report" / "comparison.md").read_text()
    assert json.loads((tmp_path / "report" / "comparison.json").read_text())["max_loss_difference"] > 0


# For --ablate: more steps than an epoch has, accumulation, and dropout.
ABLATION = ["--csv", SAMPLE_CSV, "--max_length", 16, "--train_batch_size", 96, "--gradient_accumulation_steps", 2]
ABLATION += ["--max_steps", 24, "--threads", 1, "--disable_tqdm", "--model", "tiny-bert"]


@pytest.mark.slow
def test_simulated_ranks_are_bitwise_identical_to_real_ones(launch, world, tmp_path):
    done = launch("ddp_loop", *ABLATION, "--use_cpu", "--eval_strategy", "no", "--output_dir", "run", ranks=2)
    assert done.status == 0, done.err
    settings = parse_settings(arguments=[*map(str, ABLATION), f"--cache_dir={tmp_path / 'cache'}"])
    outcome = train_variant(settings, Variant(), build_data(settings, world), ranks=2, world=world)
    steps = read_steps(tmp_path / "run")
    assert steps[-1]["epoch"] > 1
    assert outcome.losses == [step["loss"] for step in steps]
    predictions = pd.read_csv(tmp_path / "run" / "predictions.csv")
    assert outcome.correct.tolist() == (predictions["label"] == predictions["predicted"]).tolist()


@pytest.mark.slow
def test_the_table_reports_what_each_change_does_and_does_not_change(launch, tmp_path):
    done = launch("app.compare", "--ablate", "--seeds", 1, *ABLATION, "--max_steps", 4, "--output_dir", "out")
    assert done.status == 0, done.err
    assert (tmp_path / "out" / "ablation.md").read_text() in done.out
    ablation = json.loads((tmp_path / "out" / "ablation.json").read_text())
    assert len(ablation["runs"]) == len(ablation["differences"]) == 8

    def effect(name: str) -> dict[str, Any]:
        (found,) = [row for row in ablation["differences"] if name in row["change"]]
        return found

    assert effect("set_epoch")["max_loss_difference"] == 0, "there is one epoch"
    assert effect("padded to 8 equal shards")["counted_rows"] == -(-ablation["n_test"] // 8) * 8
    # 2 ranks x 2 accumulation steps: a loss near ln 2 that is logged four times too large.
    assert effect("inflated by Trainer, x 4")["max_loss_difference"] == pytest.approx(3 * 0.69, abs=0.15)
    assert effect("Adam without")["first_differing_step"] == 2, "the weights before the first step are the same"
    assert effect("dropout seed")["first_differing_step"] == 1
    one_rank = effect("one of 2 ranks")
    assert one_rank["max_loss_difference"] == one_rank["final_weight_difference"] == 0
    assert one_rank["accuracy"] < 0.7 * one_rank["baseline_accuracy"]
