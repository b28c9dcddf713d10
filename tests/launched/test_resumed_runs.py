"""Law 4: a run that is interrupted and resumed, anywhere, is bitwise identical to an uninterrupted one.

test_laws.py resumes runs under all strategies and precisions. Here are what happens to jobs (signals, restarts, lost
nodes), all architectures, and checkpoints of several ranks. Where no job of its own is needed, runs share jobs with
those of other files.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers.architectures import CONFIGS, write_model
from helpers.jobs import Job, Outcome, TrainingRun, count_steps, read_steps, require_success, run_many, write_subset
from helpers.marks import slow_after
from launched.shared_jobs import JOBS, SharedRuns
from launched.two_nodes import kill_node, processes_on, start, wait_for_all, wait_until

from app.runs.hashes import hash_results

pytestmark = pytest.mark.launched
PATHS = ("ddp_loop", "trainer_run")
FAULTY = str(Path(__file__).with_name("faulty.py"))
COMMON = ["--use_cpu", "--threads=1", "--disable_tqdm", "--cache_dir=cache"]
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
SIGNALS = {  # the number, and the processes that get it
    "SIGTERM to rank 1": (signal.SIGTERM, ["rank 1"]),
    "SIGUSR1 to rank 0": (signal.SIGUSR1, ["rank 0"]),
    "SIGINT to torchrun": (signal.SIGINT, ["torchrun"]),
    "SIGUSR1 to torchrun": (signal.SIGUSR1, ["torchrun"]),
    "SIGHUP to torchrun": (signal.SIGHUP, ["torchrun"]),  # at the end of an ssh session
    "SIGTERM to torchrun and all ranks": (signal.SIGTERM, ["torchrun", "rank 0", "rank 1"]),  # as Slurm does
    "SIGTERM in an evaluation": (signal.SIGTERM, []),  # which a rank sends itself
}
# A node is lost if it has been silent for 5 s. The others then wait up to 5 s for more nodes.
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=5"
KILLED = "SIGKILL in an evaluation"
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
    # Each path gets every second signal that comes from outside.
    *(Cell(PATHS[i % 2], PLAIN, PLAIN, name, "long") for i, name in enumerate(SIGNALS) if SIGNALS[name][1]),
    *(Cell(path, PLAIN, PLAIN, "SIGTERM in an evaluation", "evaluated") for path in PATHS),
    *(Cell(path, PLAIN, PLAIN, KILLED, "evaluated") for path in PATHS),
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
    steps = {name: stop(cell, shared_folder / name) for name, cell in cells.items()}
    started_by = {name: command_of(shared_folder / name) for name in cells}
    again = {name: cell.run(cell.path, "ddp", "--resume_from_checkpoint=auto") for name, cell in cells.items()}
    outcomes = run_many(shared_folder, again)
    assert {name: command_of(shared_folder / name) for name in cells} == started_by
    return {name: (steps[name], outcomes[name]) for name in cells}


def command_of(run: Path) -> str:
    return json.loads((run / "settings.json").read_text())["command"]


def stop(cell: Cell, run: Path) -> int:
    """Start a run on two ranks and send it signals. Return the step after which all ranks have saved and stopped."""
    number, targets = SIGNALS[str(cell.interruption)]
    program = [cell.path] if targets else [FAULTY, cell.path, "signal_in_evaluation"]
    flags = [*cell.run(cell.path, "ddp").flags, *COMMON, f"--output_dir={run}"]
    with Job(*program, *flags, cwd=run.parent, SIGNAL=number.name) as job:
        job.wait_for(lambda: count_steps(run) >= (5 if targets else 1))
        processes = {f"rank {rank}": job.rank(rank) for rank in range(2)} | {"torchrun": job.torchrun}
        for target in targets:
            processes[target].send_signal(number)
        done = job.finish(30)  # the time between SIGTERM and SIGKILL that torchrun and Slurm grant
    (line,) = (line for line in done.err.splitlines() if line.startswith("stopped: after step "))
    if "torchrun" not in targets:
        assert "exitcode  : 75" in done.err
    step = int(line.split()[3])
    assert count_steps(run) == step
    assert not (run / "metrics.json").exists()
    return step


def kill_in_evaluation(cell: Cell, run: Path) -> None:
    """Kill a rank in the first evaluation, after step 4. torchrun restarts the job."""
    flags = [*cell.run(cell.path, "ddp").flags, *COMMON, f"--output_dir={run}"]
    options = {"torchrun_flags": ("--standalone", "--max-restarts=1"), "SIGNAL": "SIGKILL"}
    with Job(FAULTY, cell.path, "signal_in_evaluation", *flags, cwd=run.parent, **options) as job:
        done = job.finish()
    assert done.status == 0, done.err
    assert re.findall(r"resumed from .*\(step (\d+)\)", done.out) == ["4"]


def lose_second_node(nodes: list[str], cell: Cell, run: Path) -> None:
    """Lose the second of two nodes and bring it back. Meanwhile the job waits for it, or trains on one rank."""
    flags, trains_without = cell.run(cell.path, cell.before[1]).flags, cell.interruption == NODE_MISSING
    # multi_node.sh changes to the project's folder.
    places = [f"--csv={run.parent / 'reviews.csv'}", f"--cache_dir={run.parent / 'cache'}", f"--output_dir={run}"]
    job = {"NNODES": "1:2" if trains_without else "2", "MAX_RESTARTS": "3", "RDZV_CONF": RENDEZVOUS}
    logs: list[Path] = []

    def start_on(node: int) -> subprocess.Popen[bytes]:
        logs.append(run.with_name(f"{run.name}-{len(logs)}.log"))
        return start(nodes, node, "c10d", f"app.{cell.path}", *flags, *COMMON, *places, log=logs[-1], **job)

    def printed() -> str:
        return "\n".join(log.read_text() for log in logs)

    def trains_on(ranks: int) -> bool:
        settings = run / "settings.json"  # a job that starts or resumes writes it before its first step
        return settings.exists() and json.loads(settings.read_text())["world_size"] == ranks

    def require(happened: Callable[[], bool]) -> None:
        wait_until(happened, 120)
        assert happened(), printed()

    first, second = map(start_on, range(2))
    require(lambda: trains_on(2) and count_steps(run) >= 10)
    kill_node(nodes[1])
    second.wait(60)
    if trains_without:
        require(lambda: trains_on(1))
        before = count_steps(run)
        require(lambda: count_steps(run) > before)
    second = start_on(1)
    wait_for_all([first, second], 360)
    assert [first.returncode, second.returncode] == [0, 0], printed()
    assert "resumed from" in printed()
    assert trains_on(2)
    assert not [pid for node in nodes for pid in processes_on(node)]


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
    elif cell.interruption in SIGNALS:
        step, outcome = request.getfixturevalue("after_signals")[cell.name]
        assert outcome.problem is None
        assert 5 <= step < len(steps)
        assert f"(step {step})" in outcome.out
    elif cell.interruption == KILLED:
        kill_in_evaluation(cell, shared_folder / cell.name)
    else:
        lose_second_node(request.getfixturevalue("nodes"), cell, shared_folder / cell.name)
    if cell.interruption == 8:
        assert steps[7]["epoch"] % 1 != 0, "the checkpoint must be from the middle of an epoch"
    if cell.variant == "early":
        assert len(steps) == 8
    run, reference = (shared_folder / name for name in (cell.name, cell.reference))
    assert hash_results(run) == hash_results(reference)
    for file in (reference / "model").glob("*config.json"):  # training changes neither config nor tokenizer
        assert (run / "model" / file.name).read_bytes() == file.read_bytes(), file
