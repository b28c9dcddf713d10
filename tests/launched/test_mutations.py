"""`app.compare --assert_equal` detects every deliberate change, one at a time, and reports where it first shows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.jobs import TrainingRun, require_success, write_subset
from helpers.marks import slow_after

from app.compare import main
from app.program import run_program

pytestmark = pytest.mark.launched
FLAGS = [
    "--csv=reviews.csv",
    "--max_steps=4",
    "--max_length=32",
    "--warmup_steps=0",
    "--eval_strategy=no",
    "--save_strategy=no",
]
FLAGS += ["--train_sampling_strategy=random"]
FLAGS += ["--max_grad_norm=0.1"]  # below every norm, so that each step is clipped

MUTATIONS = {  # what the report's line starts with
    "dropout_seed": "not equal: step 1: the loss is ",
    "one_weight": "not equal: step ",  # the last bit of one weight need not change a float32 loss at once
    "one_label": "not equal: step 1: the loss is ",
    "clip_value": "not equal: step 2: the ",
    "swapped_ranks": "not equal: step 1: the loss is ",
}
SETTINGS = {  # exit status, and what the report's line starts with
    "--seed=43": (2, "error: "),  # another seed gives another split, which is refused before anything is compared
    "--max_grad_norm=0.0999": (1, "not equal: step 2: the "),
    "--gradient_accumulation_steps=2": (1, "not equal: step "),  # by rounding, which need not change the first loss
}


# `original` is trained by the other path, so that no change is specific to one of them.
RUNS = {"original": TrainingRun("trainer_run", FLAGS), "unchanged": TrainingRun("ddp_loop", FLAGS)}
RUNS |= {name: TrainingRun("ddp_loop", FLAGS, mutation=name) for name in MUTATIONS}
SLOW_RUNS = {flag: TrainingRun("ddp_loop", [*FLAGS, flag]) for flag in SETTINGS}
SLOW_RUNS["unchanged_again"] = TrainingRun("ddp_loop", FLAGS)  # a mutation must have been undone
SHARED_RUNS = {"two_ranks": RUNS}
SLOW_SHARED_RUNS = {"two_ranks": SLOW_RUNS}


def write_inputs(folder: Path, csv: Path) -> None:
    write_subset(csv, folder / "reviews.csv", 250)


@pytest.fixture(scope="module")
def folder(trained_by, shared_folder) -> Path:
    require_success(trained_by("two_ranks"))
    return shared_folder


@pytest.fixture
def assert_equal(folder, tmp_path, monkeypatch, capsys):
    """Return the exit status of `app.compare original OTHER --assert_equal`, and its line on standard error."""

    def run(other: str) -> tuple[int, str]:
        monkeypatch.chdir(tmp_path)
        runs = [str(folder / "original"), str(folder / other)]
        monkeypatch.setattr(sys, "argv", ["compare", *runs, "--assert_equal", "--no_baselines"])
        return run_program(main), capsys.readouterr().err

    return run


@pytest.mark.parametrize("run", slow_after(1, ["unchanged", "unchanged_again"]))
def test_runs_without_a_change_are_equal(assert_equal, run):
    assert assert_equal(run) == (0, "")


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_change_that_no_file_records_is_detected(assert_equal, mutation):
    status, line = assert_equal(mutation)
    assert status == 1
    assert line.startswith(MUTATIONS[mutation])


@pytest.mark.slow
@pytest.mark.parametrize("flag", SETTINGS)
def test_a_different_setting_is_detected(assert_equal, flag):
    status, line = assert_equal(flag)
    assert status == SETTINGS[flag][0]
    assert line.startswith(SETTINGS[flag][1])
