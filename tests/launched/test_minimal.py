"""Law 7: app/minimal.py trains bitwise like app.ddp_loop, at any number of ranks. It reports a mistake in one line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from helpers.jobs import PROJECT, Job, TrainingRun, read_steps, require_success, run_many, write_subset

pytestmark = pytest.mark.launched
SAME = [
    "--train_sampling_strategy=random",
    "--gradient_accumulation_steps=2",
    "--save_strategy=no",
    "--eval_strategy=no",
]
ALL = 0  # rows

CASES = [  # ranks, rows of the CSV, and flags
    (2, 150, ["--max_steps=6"]),  # 4 steps per epoch
    pytest.param(1, 150, ["--max_steps=6"], marks=pytest.mark.slow),
    pytest.param(4, 150, ["--max_steps=6"], marks=pytest.mark.slow),
    pytest.param(3, 150, ["--train_batch_size=24"], marks=pytest.mark.slow),  # 3 epochs, and sums that 3 divides
    pytest.param(2, ALL, ["--max_steps=20"], marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("ranks", "rows", "flags"), CASES)
def test_losses_norms_weights_and_accuracy_are_bitwise_those_of_ddp_loop(
    hotel_csv: Path, tmp_path: Path, ranks: int, rows: int, flags: list[str]
) -> None:
    csv = hotel_csv
    if rows != ALL:
        csv = tmp_path / "reviews.csv"
        write_subset(hotel_csv, csv, rows)
    flags = [f"--csv={csv}", *flags]
    require_success(run_many(tmp_path, {"run": TrainingRun("ddp_loop", [*flags, *SAME])}, ranks))
    expected = read_steps(tmp_path / "run")
    with Job("app.minimal", *flags, cwd=tmp_path, ranks=ranks) as job:
        done = job.finish()
    assert done.status == 0, done.err
    *steps, result = map(json.loads, done.out.splitlines())

    assert rows == ALL or expected[-1]["epoch"] > 1, "the order of the second epoch has to be compared"
    assert any(step["grad_norm"] > 1 for step in expected), "a gradient has to be clipped"
    assert steps == [{name: step[name] for name in ("step", "loss", "grad_norm")} for step in expected]
    accuracy = json.loads((tmp_path / "run" / "metrics.json").read_text())["accuracy"]
    weights = hashlib.sha256((tmp_path / "run" / "model" / "model.safetensors").read_bytes()).hexdigest()
    assert result == {"accuracy": accuracy, "weights": weights}


@pytest.mark.slow
@pytest.mark.slow
def test_two_ranks_report_a_mistake_in_one_line(launch):
    done = launch("app.minimal", "--csv", "nope.csv", ranks=2)
    assert done.error_lines == ["error: nope.csv: no such file"]
    assert "exitcode  : 2" in done.err  # torchrun's summary: its own status is always 1
    assert done.out == ""


def test_without_torchrun_the_error_names_the_command(launch):
    done = launch("app.minimal")
    command = "torchrun --standalone --nproc_per_node=2 -m app.minimal"
    assert (done.status, done.out, done.err) == (2, "", f"error: start it with torchrun: {command}\n")


def test_the_page_has_at_most_120_lines():
    assert len((PROJECT / "app" / "minimal.py").read_text().splitlines()) <= 120
