"""`python -m app.compare` on runs that were trained: what it detects, and how it ends."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.architectures import write_model
from helpers.jobs import SAMPLE_CSV, Job, TrainingRun, require_success

from app.compare import main
from app.program import run_program

pytestmark = pytest.mark.launched
SMALL = ["--csv", SAMPLE_CSV, "--model=bert", "--max_length=32", "--max_steps=3", "--eval_strategy=no"]
SHARED_RUNS = {
    "one_rank": {
        "a": TrainingRun("ddp_loop", [*SMALL, "--learning_rate=1e-3"]),
        "b": TrainingRun("ddp_loop", [*SMALL, "--learning_rate=5e-2"]),
        # One of the initial weights becomes the next larger float32, which no file of the run records.
        "one-weight": TrainingRun("ddp_loop", [*SMALL, "--learning_rate=1e-3"], mutation="one_weight"),
        "other-path": TrainingRun("trainer_run", [*SMALL, "--learning_rate=1e-3"]),
        "one": TrainingRun("trainer_run", [*SMALL, "--threads=2"]),  # another default of --logical_ranks
        "remedied": TrainingRun("trainer_run", [*SMALL, "--logical_ranks=2", "--threads=1"]),
    },
    "two_ranks": {"two": TrainingRun("ddp_loop", SMALL)},
}


def write_inputs(folder: Path, csv: Path) -> None:
    write_model(folder / "bert", "bert")  # the reviews are the bundled sample


@pytest.fixture(scope="module")
def runs(trained_by, shared_folder) -> Path:
    for job in SHARED_RUNS:
        require_success(trained_by(job))
    return shared_folder


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys) -> Callable[..., tuple[int, list[str]]]:
    """Run app.compare in this process; return its exit status and the lines on standard error."""

    def run(*arguments: object) -> tuple[int, list[str]]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["compare", *map(str, arguments)])
        return run_program(main), capsys.readouterr().err.splitlines()

    return run


def test_different_runs_are_compared_from_their_folders(compare, runs, tmp_path):
    assert compare(runs / "a", runs / "b", "--output_dir=out") == (0, [])
    comparison = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert comparison["first_differing_step"] == 3, "the rate of step 1 is 0, so step 2 is the first to change weights"
    assert comparison["max_loss_difference"] > 0


def test_the_last_bit_of_one_initial_weight_is_detected(compare, runs):
    assert compare(runs / "other-path", runs / "a", "--assert_equal") == (0, [])
    status, (line,) = compare(runs / "other-path", runs / "one-weight", "--assert_equal")
    assert status == 1
    assert line.startswith("not equal: ")  # where depends on the machine: it need not change a float32 loss at once


def test_the_remedy_that_compare_names_makes_different_runs_identical(compare, runs, tmp_path):
    """The default number of ranks under torchrun and with plain Python, and another number of threads."""
    two, one, remedied = (runs / name for name in ("two", "one", "remedied"))
    status, (line,) = compare(two, one, "--assert_equal")
    assert status == 1
    assert re.match(r"not equal: step \d+: the loss is ", line)  # rounding: it may be equal in the first steps
    assert line.endswith(
        "; trained differently: ranks 2 and 1, logical ranks 2 and 1, threads 1 and 2; "
        "start both with --logical_ranks 2 --threads 1"
    )
    assert compare(two, remedied, "--assert_equal") == (0, [])
    assert not (tmp_path / "runs").exists(), "only a report needs a folder"
    assert compare(two, one, "--assert_equal", "--no_baselines", "--output_dir=report")[0] == 1
    assert line.partition("; ")[2] in (tmp_path / "report" / "comparison.md").read_text().replace("**T", "t")
    hashes = [json.loads((run / "metrics.json").read_text())["hash"] for run in (two, remedied, one)]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize(
    "flags", ["--dry_run", "--nproc_per_node=0", "a b --learning_rate=1e-4", "a b --seeds=2", "a missing", "a"]
)
def test_wrong_arguments_are_one_line(compare, runs, tmp_path, flags):
    arguments = [runs / flag if flag in ("a", "b", "missing") else flag for flag in flags.split()]
    status, lines = compare(*arguments)
    assert (status, len(lines)) == (2, 1)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_an_interrupt_ends_everything_that_was_started(tmp_path):
    flags = ["--nproc_per_node=2", "--use_cpu", "--csv", SAMPLE_CSV, "--num_train_epochs=50"]
    with Job("compare", *flags, cwd=tmp_path, ranks=0) as job:
        job.wait_for(lambda: list(tmp_path.rglob("steps.jsonl")))  # it trains
        assert len(job.processes()) >= 4, "compare, torchrun, two ranks"
        job.torchrun.send_signal(signal.SIGINT)
        done = job.finish(90)
    assert done.status == 130
    assert "interrupted" in done.err
