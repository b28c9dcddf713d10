"""PowerSGD: the same bits in both paths, at one number of ranks. Rounded gradients are in test_laws.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.architectures import write_model
from helpers.jobs import Outcome, TrainingRun, read_steps, require_success, write_subset

from app.runs.hashes import hash_run

pytestmark = [pytest.mark.launched, pytest.mark.slow]
PATHS = ("ddp_loop", "trainer_run")
STEPS = 8
FLAGS = ["--csv=reviews.csv", "--model=bert", "--train_batch_size=24", f"--max_steps={STEPS}", "--max_length=24"]
FLAGS += ["--warmup_steps=0", "--eval_strategy=no", "--save_strategy=steps", "--save_steps=5", "--dropout=0.1"]
POWER_SGD = [*FLAGS, "--ddp_comm_hook=power_sgd"]
CHECKPOINT = "power_sgd-ddp_loop-2/checkpoints/checkpoint-5"
SHARED_RUNS = {
    "two_ranks": {
        "plain": TrainingRun("ddp_loop", FLAGS),
        **{f"power_sgd-{path}-2": TrainingRun(path, POWER_SGD) for path in PATHS},
        "other-hook": TrainingRun("ddp_loop", [*FLAGS, f"--resume_from_checkpoint={CHECKPOINT}"]),
        "four-logical-ranks": TrainingRun("ddp_loop", [*POWER_SGD, "--logical_ranks=4"]),
    },
    "four_ranks": {f"power_sgd-{path}-4": TrainingRun(path, POWER_SGD) for path in PATHS},
}


def write_inputs(folder: Path, csv: Path) -> None:
    write_subset(csv, folder / "reviews.csv", 300)
    write_model(folder / "bert", "bert")


@pytest.fixture(scope="module")
def two_ranks(trained_by) -> dict[str, Outcome]:
    return trained_by("two_ranks")


def losses(run: Path) -> list[float]:
    return [step["loss"] for step in read_steps(run)]


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_both_paths_compress_gradients_to_the_same_bits(trained_by, shared_folder, ranks):
    outcomes, number = trained_by(f"{ranks}_ranks"), {"two": 2, "four": 4}[ranks]
    names = [f"power_sgd-{path}-{number}" for path in PATHS]
    require_success({name: outcomes[name] for name in names})
    a, b = (hash_run(shared_folder / name) for name in names)
    assert a == b


def test_power_sgd_does_not_compress_the_first_two_steps(two_ranks, shared_folder):
    plain, compressed = losses(shared_folder / "plain"), losses(shared_folder / "power_sgd-ddp_loop-2")
    assert plain[:3] == compressed[:3], "the third loss follows from the updates of the first two steps"
    assert all(a != b for a, b in zip(plain[3:], compressed[3:], strict=True))


def test_a_resumed_run_cannot_change_the_hook(two_ranks):
    assert "ddp_comm_hook was power_sgd and is no" in two_ranks["other-hook"].problem


def test_power_sgd_needs_one_rank_per_logical_rank(two_ranks):
    problem = two_ranks["four-logical-ranks"].problem
    assert problem.startswith("AgreedError: --logical_ranks 4 with --ddp_comm_hook power_sgd")
    assert problem.endswith("cannot be divided among 2 rank(s): start 4 rank(s)")
