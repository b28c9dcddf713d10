"""Laws 1 to 4: a run has the same bits in both paths, at any number of ranks, under any strategy, interrupted or not.

The factors are not multiplied: `CELLS` is a covering array, in which each pair of values of two factors occurs in at
least one cell. `app.experiments.same_bits` trains a full grid.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers.architectures import write_model
from helpers.jobs import TrainingRun, read_steps, require_success, write_subset
from helpers.marks import slow_after
from launched.shared_jobs import JOBS, SharedRuns

from app.runs.hashes import hash_results, hash_run
from app.settings import SHARDED

pytestmark = pytest.mark.launched
RANKS = {"one_rank": 1, "two_ranks": 2, "four_ranks": 4, "two_nodes": 4}  # of each shared job


class Cell(NamedTuple):
    """A run, by one value of each factor."""

    path: str
    job: str
    strategy: str
    model: str  # `tiny` fills several of DDP's buckets
    precision: str
    accumulation: int
    sampling: str
    sums: str  # the precision in which the ranks exchange gradients
    gathered: str  # and parameters
    recomputes: bool  # --activation_checkpointing, which changes no bit
    resumed_from: int | None  # a step of the reference run

    @property
    def reference(self) -> Cell:
        """The run whose bits this one must have: `ddp_loop` in one process, uninterrupted."""
        strategy = "ddp" if self.gathered == "fp32" else "zero2"
        return self._replace(path="ddp_loop", job="one_rank", strategy=strategy, recomputes=False, resumed_from=None)

    @property
    def is_possible(self) -> bool:
        """Whether the strategy has these precisions: only DDP exchanges in fp16, and only FSDP2 gathers in bf16."""
        is_sharded = self.strategy in SHARDED
        return not (is_sharded and self.sums == "fp16") and (
            self.gathered == "fp32" or (is_sharded and self.precision == "bf16")
        )

    @property
    def pairs(self) -> set[tuple[Any, ...]]:
        return {*itertools.combinations(zip(FACTORS, self, strict=True), 2)}

    @property
    def source(self) -> Cell:
        """The run whose checkpoint this one resumes, if any: of the same path, and with the same kind of strategy."""
        return self.reference._replace(path=self.path, strategy="zero3" if self.strategy in SHARDED else "ddp")

    @property
    def name(self) -> str:
        return "-".join(str(value).replace(" ", "_") for value in self)

    @property
    def run(self) -> TrainingRun:
        flags = [*FLAGS, f"--strategy={self.strategy}", f"--model={self.model}", f"--precision={self.precision}"]
        flags += [f"--gradient_accumulation_steps={self.accumulation}", f"--train_sampling_strategy={self.sampling}"]
        if self.sums != "fp32":
            name = "reduce_dtype" if self.strategy in SHARDED else "ddp_comm_hook"
            flags.append(f"--{name}={self.sums}")
        if self.strategy in SHARDED:
            flags.append(f"--param_dtype={self.gathered}")
        if self.recomputes:
            flags.append("--activation_checkpointing")
        if self.resumed_from is not None:
            flags.append(f"--resume_from_checkpoint={self.source.name}/checkpoints/checkpoint-{self.resumed_from}")
        # In fp16, the first steps overflow: those of `tiny` by themselves.
        overflows = self.precision == "fp16" and self.model == "bert"
        return TrainingRun(self.path, flags, loss_scale=2.0**22 if overflows else None)


FACTORS: dict[str, tuple[Any, ...]] = {
    "path": ("ddp_loop", "trainer_run"),
    "job": tuple(RANKS),
    "strategy": ("ddp", "zero1", "zero2", "zero3"),
    "model": ("tiny", "bert"),
    "precision": ("fp32", "bf16", "fp16"),
    "accumulation": (1, 3),
    "sampling": ("group_by_length", "random"),
    "sums": ("fp32", "bf16", "fp16"),
    "gathered": ("fp32", "bf16"),
    "recomputes": (False, True),
    "resumed_from": (None, 3, 4),  # between two evaluations, and where one is due
}
# 150 reviews: 7 validation and 15 test rows, so that neither can be divided equally, and 5 steps per epoch. Dropout and
# clipping.
FLAGS = ["--csv=reviews.csv", "--logical_ranks=4", "--train_batch_size=24", "--max_steps=6", "--max_length=24"]
FLAGS += ["--validation_size=0.05", "--eval_strategy=steps", "--eval_steps=2", "--eval_batch_size=8"]
FLAGS += ["--save_strategy=steps", "--save_steps=1", "--save_total_limit=9", "--warmup_steps=0"]
FLAGS += ["--dropout=0.1", "--max_grad_norm=0.5"]


def cover_all_pairs(seed: int = 49) -> list[Cell]:
    """Return cells with each possible pair of values of two factors, chosen greedily among random ones."""
    generator = random.Random(seed)
    random_cells = (Cell(*map(generator.choice, FACTORS.values())) for _ in range(3000))
    candidates = {cell: cell.pairs for cell in random_cells if cell.is_possible}
    cells, missing = [], set().union(*candidates.values())
    while missing:
        cells.append(max(candidates, key=lambda cell: len(candidates[cell] & missing)))
        missing -= candidates[cells[-1]]
    return cells


CELLS = cover_all_pairs()
EIGHT = TrainingRun("ddp_loop", [*FLAGS, "--logical_ranks=8", "--model=bert"])
# These bits depend on the number of ranks, so only the paths are compared.
ONLY_PATHS = {
    "power_sgd_of_two": ("two_ranks", ["--logical_ranks=2", "--ddp_comm_hook=power_sgd"]),
    "power_sgd_of_four": ("four_ranks", ["--ddp_comm_hook=power_sgd"]),
    # With three ranks, the order in which gradients are added depends on their position in a bucket.
    "buckets_of_three": ("three_ranks", ["--logical_ranks=3", "--precision=fp64", "--ddp_bucket_cap_mb=1"]),
}
SHARED_RUNS: SharedRuns = {job: {} for job in JOBS}
SLOW_SHARED_RUNS: SharedRuns = {job: {} for job in JOBS}
SLOW_SHARED_RUNS["one_rank"]["eight-1"] = SLOW_SHARED_RUNS["eight_ranks"]["eight-8"] = EIGHT
FAST_CELLS = [cell for cell in CELLS if RANKS[cell.job] < 4]
for cell in CELLS:
    for needed in [cell.reference, cell.source] if cell.resumed_from else [cell.reference]:
        (SHARED_RUNS if cell in FAST_CELLS else SLOW_SHARED_RUNS)["one_rank"][needed.name] = needed.run
for cell in CELLS:
    (SHARED_RUNS if cell in FAST_CELLS else SLOW_SHARED_RUNS)[cell.job][cell.name] = cell.run
for name, (job, flags) in ONLY_PATHS.items():
    SLOW_SHARED_RUNS[job] |= {f"{name}-{path}": TrainingRun(path, [*FLAGS, *flags]) for path in FACTORS["path"]}


def write_inputs(folder: Path, csv: Path) -> None:
    write_subset(csv, folder / "reviews.csv", 150)
    write_model(folder / "bert", "bert")


@pytest.fixture(scope="module")
def trained(trained_by, shared_folder) -> Callable[[str], Path]:
    """A function that trains the runs of a job and the reference runs, and returns the folder of all."""

    def train(job: str) -> Path:
        for name in ("one_rank", job):
            require_success(trained_by(name))
        return shared_folder

    return train


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=[] if cell in FAST_CELLS else pytest.mark.slow, id=cell.name) for cell in CELLS],
)
def test_a_run_has_the_bits_of_its_reference(trained, cell):
    folder = trained(cell.job)
    settings = json.loads((folder / cell.name / "settings.json").read_text())
    assert (settings["path"], settings["world_size"]) == (cell.path, RANKS[cell.job])
    assert settings["train_sampling_strategy"] == cell.sampling
    assert settings["activation_checkpointing"] == cell.recomputes
    for name in ("strategy", "model", "precision"):
        assert settings[name] == getattr(cell, name)
    assert hash_results(folder / cell.name) == hash_results(folder / cell.reference.name)


def test_the_cells_cover_all_pairs_of_values():
    possible = (cell for cell in itertools.starmap(Cell, itertools.product(*FACTORS.values())) if cell.is_possible)
    covered = set().union(*(cell.pairs for cell in CELLS))
    assert all(cell.pairs <= covered for cell in possible)


@pytest.mark.parametrize("cells", slow_after(1, [FAST_CELLS, CELLS]), ids=["fast", "all"])
def test_each_factor_that_may_change_bits_does(trained, cells):
    folder = trained("one_rank")
    references = {cell.reference for cell in cells}
    assert len({hash_run(folder / cell.name) for cell in references}) == len(references)
    for cell in references:
        overflows = [step["grad_norm"] is None for step in read_steps(folder / cell.name)]
        assert any(overflows) == (cell.precision == "fp16")
        assert not all(overflows)


@pytest.mark.slow
def test_eight_ranks_train_like_one(trained):
    folder = trained("eight_ranks")
    assert hash_run(folder / "eight-8") == hash_run(folder / "eight-1")


@pytest.mark.slow
@pytest.mark.parametrize("name", ONLY_PATHS)
def test_both_paths_have_the_same_bits(trained, name):
    folder = trained(ONLY_PATHS[name][0])
    assert len({hash_run(folder / f"{name}-{path}") for path in FACTORS["path"]}) == 1
