"""`python -m app.compare --ablate` as a user starts it. Unchanged, its simulated ranks train as app.ddp_loop does."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict

import pandas as pd
import pytest
import torch
from helpers.jobs import SAMPLE_CSV, read_steps

from app.cli import parse_settings
from app.compare import main
from app.experiments.ablation.rows import build_variant_data
from app.experiments.ablation.training import train_variant
from app.experiments.ablation.variants import Variant
from app.program import run_program

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
    outcome = train_variant(settings, Variant(), build_variant_data(settings, Variant(), world), ranks=2, world=world)
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
    assert len(ablation["differences"]) == 16, "one of 17 is left out"
    assert "left out: `set_epoch` forgotten: the same order in each epoch: it has no effect in 1 epoch" in done.out
    (ours, *others) = ablation["baselines"]
    by_change = {changed(row["recipe"]): row for row in ablation["differences"] if row["baseline"] == ours}
    assert by_change["counted_ranks"]["max_loss_difference"] == 0
    assert by_change["counted_ranks"]["counted_rows"] == -(-ablation["n_test"] // 8) * 8
    inflated = by_change["inflation"]
    assert inflated["recipe"]["inflation"] == 4, "2 ranks x 2 accumulation steps"
    # A loss near ln 2 that is logged four times too large.
    assert inflated["max_loss_difference"] == pytest.approx(3 * 0.69, abs=0.15)
    assert by_change["optimizer"]["first_differing_steps"] == [2], "the weights before the first step are the same"
    for change in ("dropout_seed", "split", "batch_factor"):
        assert by_change[change]["first_differing_steps"] == [1], change
    # The dropout masks differ from the first batch on that has no review of the maximum length.
    assert 0 < by_change["padding"]["max_loss_difference"] < 0.1
    one_rank = by_change["counts_rank_0_only"]
    assert one_rank["max_loss_difference"] == one_rank["final_weight_difference"] == 0
    assert one_rank["accuracies"][0] < 0.7 * ablation["baseline"]["accuracies"][0]
    assert len(others) == 3
    averaging = {(row["baseline"], row["recipe"]["averaging_interval"]): row for row in ablation["differences"]}
    for name in others:
        after_each_step, at_the_end = (averaging[name, interval]["final_weight_difference"] for interval in (1, 10))
        if name.startswith("Adam"):
            assert min(after_each_step, at_the_end) > 1e-3
        else:
            assert after_each_step < 1e-6, f"{name}: rounding"
            assert at_the_end > 5 * after_each_step, f"{name}: more than rounding"


def changed(recipe):
    (name,) = (name for name, value in asdict(Variant()).items() if recipe[name] != value)
    return name


@pytest.mark.parametrize(
    "flags",
    [
        ["a", "b"],
        ["--assert_equal"],
        ["--seeds=0"],
        ["--train_batch_size=33"],
        ["--nproc_per_node=3"],
        ["--ddp_comm_hook=bf16"],
        ["--logical_ranks=2"],
    ],
)
def test_wrong_arguments_are_one_line(tmp_path, monkeypatch, capsys, flags):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["compare", "--ablate", f"--csv={SAMPLE_CSV}", *flags])
    assert run_program(main) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert not (tmp_path / "runs" / "ablations").exists()
