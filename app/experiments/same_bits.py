"""Prove that the results do not depend on the path, the number of ranks, the strategy, or interruptions.

    python -m app.experiments.same_bits --csv reviews.csv
    python -m app.experiments.same_bits --bf16 --gradient_accumulation_steps 2 --ranks 1 2 --strategies ddp zero3

Each cell of {ddp_loop, trainer_run} x {1, 2, 4 ranks} x {ddp, zero1, zero2, zero3} x {uninterrupted, killed} is trained
by real torchrun jobs, with the same settings otherwise. A killed run loses a rank to SIGKILL after one of its
checkpoints, and is resumed with another number of ranks and another strategy. One hash is printed per cell: SHA-256 of
the final weights, the losses, gradient norms and learning rates of all steps, the evaluations, and the predictions. The
exit status is 1 unless all hashes are equal. Any training flag applies to all cells. On GPUs, --deterministic is set.

--vary trains these cells with each value of further settings: {1, 2, 4} accumulation steps, {random, group_by_length}
sampling, {fp32, bf16} precision, as many logical ranks as ranks, instead of --logical_ranks, {no, balanced} class
weights, {no, 0.1} label smoothing, and {no, 1} patience of early stopping. The cells of each
combination of values must have one hash.

    python -m app.experiments.same_bits --vary accumulation sampling precision --strategies ddp \\
        --interruptions uninterrupted

On CPUs that emulate bf16, a run with bf16 takes minutes, unless --max_steps and --train_batch_size are smaller.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

from ..cli import OneLineParser, as_flags, count, parse_flags
from ..common.errors import RunError, UserError
from ..common.files import check_exists, write_text
from ..common.formats import markdown_table
from ..common.paths import PACKAGE
from ..distributed.launcher import TorchrunJob, torchrun_command
from ..distributed.processes import check_gpus, count_gpus
from ..jobs import PATHS
from ..program import run_program
from ..runs.folder import create_folder
from ..runs.hashes import DIGITS, hash_run
from ..runs.schema import CHECKPOINTS, RUNS
from ..setting_groups import LARGEST_COUNT
from ..settings import STRATEGIES, Settings

INTERRUPTIONS = ("uninterrupted", "killed")
# What --vary can name: the setting, and its values. Those of logical_ranks are the numbers of ranks.
VARIED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "accumulation": ("gradient_accumulation_steps", (1, 2, 4)),
    "sampling": ("train_sampling_strategy", ("random", "group_by_length")),
    "precision": ("precision", ("fp32", "bf16")),
    "logical_ranks": ("logical_ranks", ()),
    "class_weights": ("class_weights", (None, "balanced")),
    "label_smoothing": ("label_smoothing_factor", (0.0, 0.1)),
    "early_stopping": ("early_stopping_patience", (None, 1)),
}
# Checkpoints in the middle of an epoch and between two evaluations. One thread per rank, because the number of threads
# affects rounding and a machine may have fewer cores than ranks.
DEFAULTS: dict[str, Any] = {
    **{"logical_ranks": 4, "dropout": 0.1, "max_steps": 60, "max_length": 32, "threads": 1, "disable_tqdm": True},
    **{"validation_size": 0.1, "eval_strategy": "steps", "eval_steps": 25, "save_strategy": "steps", "save_steps": 10},
}
TIME_LIMIT = 900.0  # seconds; a job that takes longer is considered to hang


@dataclass(frozen=True)
class Cell:
    """One way to train the same model."""

    path_name: str
    ranks: int
    strategy: str
    resumed: tuple[int, str] | None = None  # the number of ranks and the strategy after the interruption
    training: tuple[tuple[str, Any], ...] = ()  # names of `VARIED` and their values: equal ones, equal hashes

    @property
    def values(self) -> list[str]:
        """The values of the settings that are varied."""
        return [str(value) for _, value in self.training]

    @property
    def columns(self) -> list[str]:
        """The cell's columns of the table, without the hash."""
        resumed = f"killed, resumed with {self.resumed[0]} x {self.resumed[1]}" if self.resumed else "none"
        return [*self.values, self.path_name, str(self.ranks), self.strategy, resumed]

    @property
    def folder_name(self) -> str:
        killed = ["killed"] if self.resumed else []
        return "-".join([self.path_name, str(self.ranks), self.strategy, *self.values, *killed])

    def settings(self, settings: Settings) -> Settings:
        """Return the settings of all cells with the values and the strategy of this cell."""
        values = {VARIED[name][0]: value for name, value in self.training}
        return replace(settings, strategy=self.strategy, **values)  # type: ignore[arg-type]


def main() -> int:
    options, settings = parse()
    folder = create_folder(settings.output_dir, RUNS / "same_bits")
    rng = random.Random(settings.seed)
    hashes: dict[Cell, str] = {}
    cells = build_cells(options, rng)
    for number, cell in enumerate(cells, start=1):
        started = time.monotonic()
        train_cell(cell, cell.settings(settings), folder, rng=rng)
        hashes[cell] = hash_run(folder / cell.folder_name)
        seconds = time.monotonic() - started
        line = " | ".join([*cell.columns, hashes[cell][:DIGITS]])
        print(f"{number} of {len(cells)}, {seconds:.0f} s: {line}", flush=True)
        write_text(folder / "same_bits.md", as_markdown(hashes))
    problems = [problem for of_training in trainings(hashes) if (problem := find_difference(of_training, folder))]
    print(f"\n{as_markdown(hashes)}", *problems, f"written to {folder}/same_bits.md", sep="\n")
    return 1 if problems else 0


def add_arguments(parser: OneLineParser) -> None:
    parser.add_argument("--ranks", type=count, nargs="+", default=[1, 2, 4], metavar="N", help="numbers of ranks")
    for name, choices, help_text in (
        ("paths", PATHS, "training paths"),
        ("strategies", STRATEGIES, "strategies"),
        ("interruptions", INTERRUPTIONS, "kinds of runs"),
    ):
        parser.add_argument(f"--{name}", nargs="+", choices=choices, default=list(choices), help=help_text)
    parser.add_argument("--vary", nargs="+", choices=VARIED, default=[], help="settings with several values, see above")
    parser.set_defaults(**DEFAULTS)


def parse() -> tuple[Any, Settings]:
    settings, own_flags = parse_flags(__doc__, sys.argv[1:], add_arguments)
    options = argparse.Namespace(**{name: list(dict.fromkeys(values)) for name, values in own_flags.items()})
    settings = replace(settings, strategy=options.strategies[0])  # each cell has its own
    check_exists(settings.csv_path)
    if count_gpus(settings.use_cpu):  # GPUs otherwise may round differently each time
        settings = replace(settings, deterministic=True)
    if "killed" in options.interruptions and not 2 * settings.save_steps < settings.max_steps:
        raise UserError(
            f"--save_steps {settings.save_steps}: must be less than half of --max_steps {settings.max_steps}, because "
            "runs are killed after a checkpoint in the first half"
        )
    if "killed" in options.interruptions and settings.save_strategy != "steps":
        raise UserError(f"--save_strategy {settings.save_strategy}: must be steps, because runs are killed after one")
    for name in options.vary:
        field = VARIED[name][0]
        if (value := getattr(settings, field)) != getattr(Settings(**DEFAULTS), field):
            raise UserError(f"--{field} {value}: --vary {name} sets other values: remove one of the two flags")
    logical_ranks = settings.logical_ranks
    if "logical_ranks" not in options.vary and (logical_ranks is None or logical_ranks & (logical_ranks - 1)):
        raise UserError(f"--logical_ranks {logical_ranks}: must be a power of two")
    check_gpus(max(options.ranks), settings.use_cpu)
    from ..data.sampler import plan_batches  # here, like the others that import torch: --help needs none of it

    # A number of ranks may not divide --logical_ranks, and some strategies reject --ddp_comm_hook or --reduce_dtype.
    for cell in build_cells(options, random.Random(0)):
        plan_batches(cell.settings(settings), LARGEST_COUNT, cell.ranks)
    return options, settings


def build_cells(options: Any, rng: random.Random) -> list[Cell]:
    """Return all cells. Each killed run is resumed with another number of ranks and strategy, if there are others."""
    cells = []
    for values in product(*(VARIED[name][1] or options.ranks for name in options.vary)):
        training = dict(zip(options.vary, values, strict=True))
        numbers = [training["logical_ranks"]] if "logical_ranks" in training else options.ranks
        places = list(product(numbers, options.strategies))
        for path_name, (ranks, strategy), interruption in product(options.paths, places, options.interruptions):
            others = [place for place in places if place != (ranks, strategy)] or places
            elsewhere = [place for place in others if place[0] != ranks and place[1] != strategy] or others
            resumed = rng.choice(elsewhere) if interruption == "killed" else None
            cells.append(Cell(path_name, ranks, strategy, resumed, tuple(training.items())))
    return cells


def train_cell(cell: Cell, settings: Settings, folder: Path, *, rng: random.Random) -> None:
    """Train one cell into its folder. The settings have the values of this cell.

    Raises:
        RunError: a job failed, took too long, or ended before it could be killed.
    """
    run = folder / cell.folder_name
    job = build_job(cell.path_name, cell.ranks, replace(settings, output_dir=str(run)), log=Path(f"{run}.log"))
    try:
        if cell.resumed is not None:
            rank, step = rng.randrange(cell.ranks), rng.randrange(settings.save_steps, settings.max_steps // 2)
            with job:
                job.wait_until(lambda: has_saved(run, step), TIME_LIMIT)
                target = job.find_rank(rank)
                if target is None:
                    raise RunError(f"{run.name}: the job ended before it could be killed; see {job.stdout}")
                target.kill()
                job.wait(TIME_LIMIT)
            ranks, strategy = cell.resumed
            resumed = replace(settings, strategy=strategy, output_dir=None, resume_from_checkpoint=str(run))  # type: ignore[arg-type]
            job = build_job(cell.path_name, ranks, resumed, log=Path(f"{run}-resumed.log"))
        with job:
            status = job.wait(TIME_LIMIT)
    except TimeoutError:
        raise RunError(f"{run.name}: still running after {TIME_LIMIT:.0f} s; see {run}*.log") from None
    if status != 0:
        raise RunError(f"{run.name} failed with exit status {status}; see {job.stdout}")


def has_saved(run: Path, step: int) -> bool:
    """Return whether a run has a complete checkpoint of this step or a later one."""
    from ..checkpoint.manager import latest_first, step_of, was_complete

    return any(was_complete(folder) and step_of(folder) >= step for folder in latest_first(run / CHECKPOINTS))


def build_job(path_name: str, ranks: int, settings: Settings, *, log: Path) -> TorchrunJob:
    command = torchrun_command(f"{PACKAGE}.{path_name}", as_flags(settings), nproc_per_node=ranks)
    return TorchrunJob(command, environment={"OMP_NUM_THREADS": str(settings.threads)}, stdout=log, grace_seconds=0)


def trainings(hashes: Mapping[Cell, str]) -> list[dict[Cell, str]]:
    """Divide the cells, which are in the order of `build_cells`, into those that must have one hash."""
    return [dict(cells) for _, cells in groupby(hashes.items(), key=lambda item: item[0].training)]


def as_markdown(hashes: Mapping[Cell, str]) -> str:
    """Return the table, and for each training whether all of its hashes are equal."""
    varied = [name for name, _ in next(iter(hashes)).training]
    header = [*varied, "path", "ranks", "strategy", "interruption", "hash"]
    rows = [[*cell.columns, hash_[:DIGITS]] for cell, hash_ in hashes.items()]
    conclusions = "\n".join(conclude(cells) for cells in trainings(hashes))
    return f"{markdown_table(header, rows, text_columns=len(header))}\n{conclusions}\n"


def conclude(hashes: Mapping[Cell, str]) -> str:
    """Say whether the cells of one training have one hash."""
    training = ", ".join(f"{name} {value}" for name, value in next(iter(hashes)).training)
    different = len(set(hashes.values()))
    if len(hashes) == 1:
        conclusion = "1 cell: nothing to compare it with"
    elif different == 1:
        conclusion = f"all {len(hashes)} cells have one hash: bitwise identical"
    else:
        conclusion = f"{different} different hashes in {len(hashes)} cells: not bitwise identical"
    return f"{training}: {conclusion}" if training else conclusion


def find_difference(hashes: Mapping[Cell, str], folder: Path) -> str | None:
    """Return the first difference between two runs of a training, or None if all its cells have one hash."""
    from ..report.bitwise import first_difference
    from ..runs.reader import read_run

    first, *others = hashes
    for other in others:
        if hashes[other] != hashes[first]:
            a, b = (read_run(folder / cell.folder_name) for cell in (first, other))
            # The hash also covers evaluations during training and learning rates.
            return first_difference(a, b) or f"evaluations.jsonl or steps.jsonl differs in {a.folder} and {b.folder}"
    return None


if __name__ == "__main__":
    sys.exit(run_program(main))
