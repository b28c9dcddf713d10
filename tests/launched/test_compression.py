"""Compressed gradients: the same bits in both paths; rounded ones at any number of ranks."""

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
FLAGS += [
    "--warmup_steps=0",
    "--eval_strategy=steps",
    f"--eval_steps={STEPS}",
    "--save_strategy=steps",
    "--save_steps=5",
    "--dropout=0.1",
]
POWER_SGD = [*FLAGS, "--ddp_comm_hook=power_sgd"]
ROUNDED = {  # independent of the number of ranks
    "bf16": ["--ddp_comm_hook=bf16"],
    "fp16": ["--ddp_comm_hook=fp16", "--gradient_accumulation_steps=2"],
    "fp16-autocast": ["--ddp_comm_hook=fp16", "--precision=fp16"],
}


def rounded(variant: str, path: str, strategy: str) -> TrainingRun:
    return TrainingRun(path, [*FLAGS, "--logical_ranks=4", *ROUNDED[variant], f"--strategy={strategy}"])


def write_inputs(folder: Path, csv: Path) -> None:
    write_subset(csv, folder / "reviews.csv", 300)
    write_model(folder / "bert", "bert")


TWO_RANKS = {"plain": TrainingRun("ddp_loop", FLAGS)}
TWO_RANKS |= {f"bf16-{path}-2": rounded("bf16", path, "ddp") for path in PATHS}
TWO_RANKS |= {f"power_sgd-{path}": TrainingRun(path, POWER_SGD) for path in PATHS}
checkpoint = "--resume_from_checkpoint=power_sgd-ddp_loop/checkpoints/checkpoint-5"
TWO_RANKS["other-hook"] = TrainingRun("ddp_loop", [*FLAGS, checkpoint])
TWO_RANKS["four-logical-ranks"] = TrainingRun("ddp_loop", [*POWER_SGD, "--logical_ranks=4"])
SHARED_RUNS = {"two_ranks": TWO_RANKS}
SLOW_SHARED_RUNS = {
    "one_rank": {f"{variant}-0": rounded(variant, "trainer_run", "zero1") for variant in ROUNDED},
    "four_ranks": {f"{variant}-4": rounded(variant, "ddp_loop", "zero1") for variant in ROUNDED}
    | {f"power_sgd-{path}-4": TrainingRun(path, POWER_SGD) for path in PATHS},
    "two_nodes": {f"{variant}-two-nodes": rounded(variant, "trainer_run", "ddp") for variant in ROUNDED},
}


@pytest.fixture(scope="module")
def folder(shared_folder) -> Path:
    return shared_folder


@pytest.fixture(scope="module")
def two_ranks(trained_by) -> dict[str, Outcome]:
    return trained_by("two_ranks")


@pytest.fixture(scope="module")
def all_ranks(trained_by, folder) -> Path:
    for job in SLOW_SHARED_RUNS:
        require_success(trained_by(job))
    return folder


def losses(run: Path) -> list[float]:
    return [step["loss"] for step in read_steps(run)]


@pytest.mark.parametrize("name", ["bf16-{path}-2", "power_sgd-{path}"])
def test_both_paths_compress_gradients_to_the_same_bits(folder, two_ranks, name):
    a, b = (name.format(path=path) for path in PATHS)
    assert (two_ranks[a].problem, two_ranks[b].problem) == (None, None)
    assert "gradients compressed with" in two_ranks[a].out
    assert hash_run(folder / a) == hash_run(folder / b)


def test_power_sgd_does_not_compress_the_first_two_steps(folder, two_ranks):
    plain, compressed = losses(folder / "plain"), losses(folder / "power_sgd-ddp_loop")
    assert plain[:3] == compressed[:3], "the third loss follows from the updates of the first two steps"
    assert all(a != b for a, b in zip(plain[3:], compressed[3:], strict=True))
    assert losses(folder / "bf16-ddp_loop-2")[1] != plain[1]


def test_a_resumed_run_cannot_change_the_hook(two_ranks):
    assert "ddp_comm_hook was power_sgd and is no" in two_ranks["other-hook"].problem


def test_power_sgd_needs_one_rank_per_logical_rank(two_ranks):
    problem = two_ranks["four-logical-ranks"].problem
    assert problem.endswith("4 logical ranks need 4 ranks, not 2")
    assert problem.startswith("AgreedError: --ddp_comm_hook power_sgd")


@pytest.mark.parametrize("variant", ROUNDED)
def test_rounded_gradients_train_to_the_same_bits_at_any_number_of_ranks(all_ranks, variant):
    names = [
        f"{variant}-0",
        f"{variant}-4",
        f"{variant}-two-nodes",
        *(f"bf16-{path}-2" for path in PATHS if variant == "bf16"),
    ]
    hashes = {name: hash_run(all_ranks / name) for name in names}
    assert len(set(hashes.values())) == 1, hashes


def test_both_paths_train_the_same_with_power_sgd_on_four_ranks(all_ranks):
    a, b = (hash_run(all_ranks / f"power_sgd-{path}-4") for path in PATHS)
    assert a == b
    assert a != hash_run(all_ranks / "power_sgd-ddp_loop")
