"""`python -m app.compare --ablate` as a user starts it. Unchanged, its simulated ranks train as app.ddp_loop does."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
import torch
from helpers.jobs import SAMPLE_CSV, read_steps

from app.cli import parse_settings
from app.compare import main
from app.experiments.ablation import train_variant
from app.experiments.variants import Variant
from app.program import run_program
from app.training.build import build_data

# More steps than an epoch has, accumulation, and dropout.
FLAGS = ["--csv", SAMPLE_CSV, "--max_length", 16, "--train_batch_size", 96, "--gradient_accumulation_steps", 2]
FLAGS += ["--max_steps", 24, "--threads", 1, "--disable_tqdm", "--model", "tiny-bert"]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread in this process, as in the launched job: the number of threads changes the last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.launched
@pytest.mark.slow
def test_simulated_ranks_are_bitwise_identical_to_real_ones(launch, world, one_thread, tmp_path):
    done = launch("ddp_loop", *FLAGS, "--use_cpu", "--eval_strategy", "no", "--output_dir", "run", ranks=2)
    assert done.status == 0, done.err
    settings = parse_settings(arguments=[*map(str, FLAGS), f"--cache_dir={tmp_path / 'cache'}"])
    outcome = train_variant(settings, Variant(), build_data(settings, world), ranks=2, world=world)
    steps = read_steps(tmp_path / "run")
    assert steps[-1]["epoch"] > 1
    assert outcome.losses == [step["loss"] for step in steps]
    predictions = pd.read_csv(tmp_path / "run" / "predictions.csv")
    assert outcome.correct.tolist() == (predictions["label"] == predictions["predicted"]).tolist()


@pytest.mark.launched
@pytest.mark.slow
def test_the_table_reports_what_each_change_does_and_does_not_change(launch, tmp_path):
    done = launch("app.compare", "--ablate", "--seeds", 1, *FLAGS, "--max_steps", 4, "--output_dir", "out")
    assert done.status == 0, done.err
    assert (tmp_path / "out" / "ablation.md").read_text() in done.out
    ablation = json.loads((tmp_path / "out" / "ablation.json").read_text())
    assert len(ablation["runs"]) == len(ablation["differences"]) == 11

    def effect(name: str) -> dict[str, Any]:
        (found,) = [row for row in ablation["differences"] if name in row["change"]]
        return found

    assert effect("set_epoch")["max_loss_difference"] == 0, "there is one epoch"
    padded = effect("padded to 8 equal shards")
    assert padded["max_loss_difference"] == 0
    assert padded["counted_rows"] == -(-ablation["n_test"] // 8) * 8
    # 2 ranks x 2 accumulation steps: a loss near ln 2 that is logged four times too large.
    assert effect("inflated by Trainer, x 4")["max_loss_difference"] == pytest.approx(3 * 0.69, abs=0.15)
    assert effect("Adam without")["first_differing_step"] == 2, "the weights before the first step are the same"
    assert effect("dropout seed")["first_differing_step"] == 1
    one_rank = effect("one of 2 ranks")
    assert one_rank["max_loss_difference"] == one_rank["final_weight_difference"] == 0
    assert one_rank["accuracy"] < 0.7 * one_rank["baseline_accuracy"]
    assert effect("Adam: parameters averaged")["final_weight_difference"] > 1e-3
    for name in ("SGD: parameters averaged", "SGD with momentum: parameters averaged"):
        assert effect(name)["final_weight_difference"] < 1e-6, "rounding"


@pytest.mark.parametrize(
    "flags", [["a", "b"], ["--assert_equal"], ["--seeds=0"], ["--train_batch_size=33"], ["--ddp_comm_hook=bf16"]]
)
def test_wrong_arguments_are_one_line(tmp_path, monkeypatch, capsys, flags):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["compare", "--ablate", f"--csv={SAMPLE_CSV}", *flags])
    assert run_program(main) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert not (tmp_path / "runs" / "ablations").exists()
