"""`--param_dtype` and `--reduce_dtype`: the same bits in both paths, with zero2 and zero3, on any number of ranks."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from helpers.architectures import write_model
from helpers.jobs import Outcome, TrainingRun, require_success, write_subset

from app.runs.hashes import hash_run
from app.settings import SHARDED

pytestmark = [pytest.mark.launched, pytest.mark.slow]
PATHS = ("ddp_loop", "trainer_run")
FLAGS = ["--csv=reviews.csv", "--model=bert", "--train_batch_size=24", "--max_steps=8", "--max_length=24"]
FLAGS += ["--warmup_steps=0", "--eval_strategy=steps", "--eval_steps=8", "--save_strategy=steps", "--save_steps=5"]
FLAGS += ["--dropout=0.1", "--logical_ranks=4"]
ROUNDED_SUMS = [*FLAGS, "--gradient_accumulation_steps=2"]
BF16 = [*FLAGS, "--precision=bf16", "--param_dtype=bf16", "--reduce_dtype=bf16"]


def of_all_paths_and_strategies(prefix: str) -> dict[str, TrainingRun]:
    return {
        f"{prefix}-{path}-{strategy}": TrainingRun(path, [*BF16, f"--strategy={strategy}"])
        for path, strategy in product(PATHS, SHARDED)
    }


def write_inputs(folder: Path, csv: Path) -> None:
    write_subset(csv, folder / "reviews.csv", 300)
    write_model(folder / "bert", "bert")


ONE_RANK, TWO_RANKS = (of_all_paths_and_strategies(ranks) for ranks in ("one", "two"))
for path, (before, after) in zip(PATHS, (SHARDED, SHARDED[::-1]), strict=True):
    checkpoint = f"--resume_from_checkpoint=one-{path}-{before}/checkpoints/checkpoint-5"
    TWO_RANKS[f"resumed-{path}"] = TrainingRun(path, [*BF16, f"--strategy={after}", checkpoint])
TWO_RANKS |= {
    "plain": TrainingRun("ddp_loop", [*FLAGS, "--precision=bf16"]),
    "other-dtype": TrainingRun(
        "ddp_loop", [*FLAGS, "--precision=bf16", "--strategy=zero2", "--resume_from_checkpoint=two-ddp_loop-zero2"]
    ),
    "hook": TrainingRun("ddp_loop", [*ROUNDED_SUMS, "--ddp_comm_hook=bf16"]),
    "reduced": TrainingRun("trainer_run", [*ROUNDED_SUMS, "--strategy=zero3", "--reduce_dtype=bf16"]),
    "not-reduced": TrainingRun("trainer_run", [*ROUNDED_SUMS, "--strategy=zero3"]),
}
SHARED_RUNS = {"one_rank": ONE_RANK, "two_ranks": TWO_RANKS}
SLOW_SHARED_RUNS = {
    "four_ranks": of_all_paths_and_strategies("four"),
    "two_nodes": of_all_paths_and_strategies("two-nodes"),
}


@pytest.fixture(scope="module")
def folder(trained_by, shared_folder) -> Path:
    require_success(trained_by("one_rank"))
    return shared_folder


@pytest.fixture(scope="module")
def two_ranks(folder, trained_by) -> dict[str, Outcome]:
    return trained_by("two_ranks")


@pytest.fixture(scope="module")
def hashes(folder, two_ranks) -> dict[str, str]:
    finished = {name: outcome for name, outcome in two_ranks.items() if name != "other-dtype"}
    require_success(finished)
    return {name: hash_run(folder / name) for name in (*ONE_RANK, *finished)}


def test_both_paths_and_strategies_are_the_same_on_one_and_two_ranks(hashes, two_ranks):
    names = [*ONE_RANK, *(name for name in TWO_RANKS if name.startswith("two-"))]
    assert len(names) == 8
    assert len({hashes[name] for name in names}) == 1, hashes
    assert hashes["plain"] != hashes[names[0]], "the setting has an effect"
    assert "zero2, parameters gathered in bf16, gradients reduced in bf16," in two_ranks["two-ddp_loop-zero2"].out


@pytest.mark.parametrize("path", PATHS)
def test_a_resumed_run_is_the_same_with_other_ranks_and_another_strategy(hashes, path):
    assert hashes[f"resumed-{path}"] == hashes[f"one-{path}-zero2"]


def test_a_resumed_run_cannot_change_the_precision(two_ranks):
    problem = two_ranks["other-dtype"].problem
    assert "param_dtype was bf16 and is fp32; reduce_dtype was bf16 and is fp32" in problem


def test_reduced_gradients_are_those_that_ddp_compresses(hashes):
    assert hashes["reduced"] == hashes["hook"]
    assert hashes["not-reduced"] != hashes["hook"]


@pytest.mark.parametrize("job", SLOW_SHARED_RUNS)
def test_four_ranks_are_the_same_on_one_node_and_on_two(folder, hashes, trained_by, job):
    require_success(trained_by(job))
    found = {name: hash_run(folder / name) for name in SLOW_SHARED_RUNS[job]}
    assert set(found.values()) == {hashes["one-ddp_loop-zero2"]}, found
