"""Law 4: a run that is interrupted and resumed, anywhere, is bitwise identical to an uninterrupted one.

test_laws.py resumes runs under all strategies and precisions. Here are what happens to jobs (signals, restarts, lost
nodes), all architectures, and checkpoints of several ranks. Where no job of its own is needed, runs share jobs with
those of other files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers.architectures import CONFIGS, write_model
from helpers.jobs import Outcome, TrainingRun, read_steps, require_success, run_many, write_subset
from helpers.marks import slow_after
from launched.interruptions import SIGNALS, kill_in_evaluation, lose_second_node, stop
from launched.shared_jobs import JOBS, SharedRuns

from app.runs.hashes import hash_results

pytestmark = pytest.mark.launched
PATHS = ("ddp_loop", "trainer_run")
JOB = {1: "one_rank", 2: "two_ranks", 3: "three_ranks", 4: "four_ranks"}
# 162 training rows: 10 steps per epoch. Checkpoints in the middle of an epoch and between two evaluations, with
# dropout and clipping.
FLAGS = ["--csv=reviews.csv", "--train_batch_size=16", "--max_length=16", "--max_steps=16", "--warmup_steps=0"]
FLAGS += ["--gradient_accumulation_steps=2", "--max_grad_norm=0.5", "--validation_size=0.1", "--eval_strategy=steps"]
FLAGS += ["--eval_steps=6", "--save_strategy=steps", "--save_steps=4", "--save_total_limit=99", "--model=bert"]
ANY_RANKS = ["--logical_ranks=4"]
BEST = [*ANY_RANKS, "--load_best_model_at_end", "--metric_for_best_model=loss"]
TWO = ["--logical_ranks=2"]
WEIGHTED = ["--class_weights=balanced", "--label_smoothing_factor=0.1"]
# Folders with a config and a tokenizer: the name of the config, and changes of the tokenizer.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in CONFIGS}
MODELS["no_mask"] = ("bert", {"model_input_names": ["input_ids"]})
MODELS["more_inputs"] = ("distilbert", {"model_input_names": ["input_ids", "token_type_ids"]})  # than the model accepts
VARIANTS = {
    "best": BEST,
    "three": ["--logical_ranks=3", "--train_batch_size=18"],
    # After the last step, the learning rate is not zero, so an additional step would change the weights.
    "constant": [*ANY_RANKS, "--lr_scheduler_type=constant"],
    "evaluated": [*BEST, "--eval_steps=4", "--eval_batch_size=4", "--save_steps=2"],  # step 4 is saved and evaluated
    # Training stops after step 8, although it is not the last one.
    "early": [*ANY_RANKS, "--eval_steps=4", "--early_stopping_patience=1", "--early_stopping_threshold=10", *WEIGHTED],
    "long": [*BEST, "--max_steps=200", "--eval_steps=60", "--save_steps=20"],
    # A restart must find the run still training: rendezvous of two nodes take seconds.
    "slow": [
        *ANY_RANKS,
        "--model=tiny-bert",
        "--max_steps=200",
        "--max_length=48",
        "--eval_steps=100",
        "--save_steps=5",
    ],
    "classes": [*TWO, "--max_steps=8", "--csv=three_classes.csv"],  # a bias that two ranks cannot share equally
    **{name: [*TWO, f"--model={name}"] for name in MODELS},
}
VARIANTS["xlnet"].append("--ddp_find_unused_parameters")
# Any ranks, strategy and path train these variants to the same bits as ddp_loop with so many ranks; the others as one.
REFERENCE_RANKS = {"three": 3, "classes": 2} | dict.fromkeys(MODELS, 2)
NODE_RETURNS, NODE_MISSING = "a node dies and comes back", "a node is missing for some time"


@dataclass(frozen=True)
class Cell:
    """An interruption, and where the run is before and after it: (ranks, strategy)."""

    path: str
    before: tuple[int, str]
    after: tuple[int, str]
    interruption: int | str  # the step from which it is resumed, or what happens to its job
    variant: str = "best"
    resumed_by: str = ""  # the path that resumes the run, if it is the other one

    @property
    def source(self) -> str:
        """The name of the uninterrupted run before the interruption."""
        return name_of(self.variant, self.path, *self.before)

    @property
    def reference_ranks(self) -> int:
        return REFERENCE_RANKS.get(self.variant, 1)

    @property
    def reference(self) -> str:
        """The name of the uninterrupted run that the resumed one has to equal."""
        return name_of(self.variant, "ddp_loop", self.reference_ranks, "ddp")

    @property
    def name(self) -> str:
        before, after = ("-".join(map(str, place)) for place in (self.before, self.after))
        return f"{self.variant}-{self.path}-{before}-to-{after}-{self.interruption}".replace(" ", "_")

    def run(self, path: str, strategy: str, *more: str) -> TrainingRun:
        return TrainingRun(path, [*FLAGS, *VARIANTS[self.variant], f"--strategy={strategy}", *more])


def name_of(variant: str, path: str, ranks: int, strategy: str) -> str:
    return f"{variant}-{path}-{ranks}-{strategy}"


PLAIN = (2, "ddp")
FAST_CELLS = [
    Cell("ddp_loop", (1, "ddp"), (2, "zero3"), 8, resumed_by="trainer_run"),
    Cell("trainer_run", (1, "zero3"), (2, "zero1"), 8, resumed_by="ddp_loop"),
    *(Cell(path, PLAIN, PLAIN, 8, "batch_norm") for path in PATHS),  # has buffers
    # The first thing that the resumed run does is the evaluation after which it stops.
    *(Cell(path, (1, "ddp"), (2, "zero3"), 8, "early") for path in PATHS),
]
SLOW_CELLS = [
    Cell("ddp_loop", (2, "zero3"), (4, "zero1"), 8),
    Cell("trainer_run", (2, "zero1"), (4, "zero2"), 8),
    # A third of the elements of a parameter does not fill vector registers.
    *(Cell(path, (3, "ddp"), (3, "zero3"), 8, "three") for path in PATHS),
    *(Cell(path, (1, "ddp"), (1, "ddp"), 16, "constant") for path in PATHS),  # at the end
    *(Cell(path, PLAIN, PLAIN, 16, "batch_norm") for path in PATHS),
    *(Cell(path, PLAIN, PLAIN, 8, name) for path in PATHS for name in MODELS if name != "batch_norm"),
    Cell("trainer_run", (2, "zero3"), (2, "zero3"), 4, "classes"),
    Cell("ddp_loop", PLAIN, PLAIN, "SIGTERM to rank 1", "long"),
    Cell("trainer_run", PLAIN, PLAIN, "SIGUSR1 to rank 0", "long"),
    Cell("ddp_loop", PLAIN, PLAIN, "SIGINT to torchrun", "long"),
    Cell("ddp_loop", PLAIN, PLAIN, "SIGUSR1 to torchrun", "long"),
    Cell("trainer_run", PLAIN, PLAIN, "SIGTERM to torchrun and all ranks", "long"),
    *(
        Cell(path, PLAIN, PLAIN, f"{name} in an evaluation", "evaluated")
        for path in PATHS
        for name in ("SIGTERM", "SIGKILL")
    ),
    Cell("ddp_loop", PLAIN, PLAIN, NODE_RETURNS, "slow"),
    Cell("ddp_loop", (2, "zero3"), (2, "zero3"), NODE_MISSING, "slow"),
]


def shared_runs(cells: Iterable[Cell]) -> SharedRuns:
    runs: SharedRuns = {job: {} for job in JOB.values()}
    for cell in cells:
        runs[JOB[cell.reference_ranks]][cell.reference] = cell.run("ddp_loop", "ddp")
        if isinstance(cell.interruption, int):
            (before, strategy), (after, other_strategy) = cell.before, cell.after
            runs[JOB[before]][cell.source] = cell.run(cell.path, strategy)
            checkpoint = f"--resume_from_checkpoint={cell.source}/checkpoints/checkpoint-{cell.interruption}"
            runs[JOB[after]][cell.name] = cell.run(cell.resumed_by or cell.path, other_strategy, checkpoint)
    return runs


SHARED_RUNS = shared_runs(FAST_CELLS)
SLOW_SHARED_RUNS = shared_runs(SLOW_CELLS)


def write_inputs(folder: Path, csv: Path) -> None:
    write_subset(csv, folder / "reviews.csv", 200)
    reviews = pd.read_csv(folder / "reviews.csv")
    reviews.loc[::3, "label"] = 2
    reviews.to_csv(folder / "three_classes.csv", index=False)
    for name, (config, changes) in MODELS.items():
        write_model(folder / name, config, **changes)


@pytest.fixture(scope="module")
def after_signals(shared_folder) -> dict[str, tuple[int, Outcome]]:
    """The step after which each run stopped, and the outcome of resuming it; one job resumes all."""
    cells = {cell.name: cell for cell in SLOW_CELLS if cell.interruption in SIGNALS}
    steps = {
        name: stop(cell.path, cell.run(cell.path, "ddp").flags, shared_folder / name, str(cell.interruption))
        for name, cell in cells.items()
    }
    again = {name: cell.run(cell.path, "ddp", "--resume_from_checkpoint=auto") for name, cell in cells.items()}
    outcomes = run_many(shared_folder, again)
    return {name: (steps[name], outcomes[name]) for name in cells}


def interrupt_and_resume(cell: Cell, folder: Path, request: pytest.FixtureRequest) -> None:
    """Let the run `folder / cell.name` be interrupted and resumed, and check from which step it was resumed."""
    flags, run = cell.run(cell.path, cell.before[1]).flags, folder / cell.name
    if cell.interruption in SIGNALS:
        step, outcome = request.getfixturevalue("after_signals")[cell.name]
        assert outcome.problem is None
        assert 5 <= step < len(read_steps(folder / cell.reference))
        assert f"(step {step})" in outcome.out
    elif cell.interruption == "SIGKILL in an evaluation":
        assert kill_in_evaluation(cell.path, [*flags, f"--output_dir={run}"], folder) == [4]
    else:
        nodes = request.getfixturevalue("nodes")
        lose_second_node(nodes, cell.path, flags, run, trains_without=cell.interruption == NODE_MISSING)


@pytest.mark.parametrize("cell", slow_after(len(FAST_CELLS), FAST_CELLS + SLOW_CELLS), ids=lambda cell: cell.name)
def test_a_resumed_run_is_bitwise_identical_to_an_uninterrupted_one(cell, trained_by, shared_folder, request):
    outcomes = {}
    jobs = {JOB[ranks] for ranks in (cell.reference_ranks, cell.before[0], cell.after[0])}
    for job in sorted(jobs, key=[*JOBS].index):
        outcomes |= trained_by(job)
    require_success({name: outcomes[name] for name in (cell.reference, cell.source, cell.name) if name in outcomes})
    steps = read_steps(shared_folder / cell.reference)
    if isinstance(cell.interruption, int):
        assert f"(step {cell.interruption})" in outcomes[cell.name].out
    else:
        interrupt_and_resume(cell, shared_folder, request)
    if cell.interruption == 8:
        assert steps[7]["epoch"] % 1 != 0, "the checkpoint must be from the middle of an epoch"
    if cell.variant == "early":
        assert len(steps) == 8
    run, reference = (shared_folder / name for name in (cell.name, cell.reference))
    assert hash_results(run) == hash_results(reference)
    for file in (reference / "model").glob("*config.json"):  # training changes neither config nor tokenizer
        assert (run / "model" / file.name).read_bytes() == file.read_bytes(), file
