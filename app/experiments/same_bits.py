"""Prove that the results do not depend on the path, the number of ranks, the strategy, or interruptions.

    python -m app.experiments.same_bits --csv reviews.csv
    python -m app.experiments.same_bits --bf16 --gradient_accumulation_steps 2 --ranks 1 2 --strategies ddp zero3

Each cell of {ddp_loop, trainer_run} x {1, 2, 4 ranks} x {ddp, zero1, zero2, zero3} x {uninterrupted, killed} is trained
by real torchrun jobs, with the same settings otherwise. A killed run loses a rank to SIGKILL after one of its
checkpoints, and is resumed with another number of ranks and another strategy. One hash is printed per cell: SHA-256 of
the final weights, the losses, gradient norms and learning rates of all steps, the evaluations, and the predictions. The
exit status is 1 unless all hashes are equal. Any training flag applies to all cells. On GPUs, --deterministic is set.

--vary trains these cells with each value of further settings: {1, 2, 4} accumulation steps, {random, group_by_length}
sampling, {fp32, bf16} precision, and as many logical ranks as ranks, instead of --logical_ranks. Each combination of
values is a training of its own: its cells must have one hash.

    python -m app.experiments.same_bits --vary accumulation sampling precision --strategies ddp \\
        --interruptions uninterrupted

On CPUs that emulate bf16, a run with bf16 takes minutes, unless --max_steps and --train_batch_size are smaller.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoint.manager import latest_first, step_of, was_complete
from ..cli import OneLineParser, as_flags, count, settings_parser
from ..common.errors import RunError, UserError
from ..common.files import write_text
from ..common.paths import PACKAGE
from ..common.valid import LARGEST_COUNT
from ..data.sampler import plan_batches
from ..distributed.launcher import TorchrunJob, torchrun_command
from ..distributed.processes import check_gpus
from ..program import run_program
from ..report.bitwise import first_difference
from ..runs.folder import create_folder
from ..runs.hashes import DIGITS, hash_run
from ..runs.reader import read_run
from ..runs.schema import CHECKPOINTS, RUNS
from ..settings import STRATEGIES, Settings
from .same_bits_cells import VARIED, Cell, as_markdown, build_cells, trainings
from .train_pair import PATHS, deterministic_on_gpus

RANKS = (1, 2, 4)
INTERRUPTIONS = ("uninterrupted", "killed")
# Checkpoints in the middle of an epoch and between two evaluations. One thread per rank, because the number of threads
# affects rounding and a machine may have fewer cores than ranks.
DEFAULTS: dict[str, Any] = {
    "logical_ranks": 4,
    "dropout": 0.1,
    "max_steps": 60,
    "max_length": 32,
    "validation_size": 0.1,
    "eval_strategy": "steps",
    "eval_steps": 25,
    "save_strategy": "steps",
    "save_steps": 10,
    "threads": 1,
    "disable_tqdm": True,
}
TIME_LIMIT = 900.0  # seconds; a job that takes longer is considered to hang


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
    problems = [problem for cells in trainings(hashes) if (problem := find_difference(cells, folder))]
    print(f"\n{as_markdown(hashes)}", *problems, f"written to {folder}/same_bits.md", sep="\n")
    return 1 if problems else 0


def add_arguments(parser: OneLineParser) -> None:
    """Add the flags of this program."""
    parser.add_argument("--ranks", type=count, nargs="+", default=list(RANKS), metavar="N", help="numbers of ranks")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS), help="training paths")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES), help="strategies")
    parser.add_argument(
        "--interruptions", nargs="+", choices=INTERRUPTIONS, default=list(INTERRUPTIONS), help="kinds of runs"
    )
    parser.add_argument(
        "--vary", nargs="+", choices=VARIED, default=[], help="settings that get several values, see above"
    )


def parse() -> tuple[Any, Settings]:
    """Return the options of this program and the settings that all cells share.

    Raises:
        UserError: an invalid flag, or more ranks than GPUs.
    """
    parser = settings_parser(__doc__, add_arguments)
    parser.set_defaults(**DEFAULTS)
    values = parser.values(sys.argv[1:])
    names = ("ranks", "paths", "strategies", "interruptions", "vary")
    options = argparse.Namespace(**{name: list(dict.fromkeys(values.pop(name))) for name in names})
    settings = deterministic_on_gpus(Settings(**values))
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
    if "logical_ranks" not in options.vary:
        if settings.logical_ranks is None or settings.logical_ranks & (settings.logical_ranks - 1):
            raise UserError(f"--logical_ranks {settings.logical_ranks}: must be a power of two")
        if wrong := [n for n in options.ranks if settings.logical_ranks % n]:
            raise UserError(f"--ranks {wrong[0]}: must divide --logical_ranks {settings.logical_ranks}")
    check_gpus(max(options.ranks), settings.use_cpu)
    for cell in build_cells(options, random.Random(0)):  # such as --ddp_comm_hook, which some strategies refuse
        plan_batches(replace(cell.settings(settings), strategy=cell.strategy), LARGEST_COUNT, cell.ranks)  # type: ignore[arg-type]
    return options, settings


def train_cell(cell: Cell, settings: Settings, folder: Path, *, rng: random.Random) -> None:
    """Train one cell into its folder.

    Raises:
        RunError: a job failed, or ended before it could be killed.
    """
    run = folder / cell.folder_name
    if cell.resumed is None:
        finish(start(cell.path_name, cell.ranks, cell.strategy, settings=settings, run=run), run)
        return
    rank, step = rng.randrange(cell.ranks), rng.randrange(settings.save_steps, settings.max_steps // 2)

    def late_enough() -> bool:
        return any(was_complete(one) and step_of(one) >= step for one in latest_first(run / CHECKPOINTS))

    with start(cell.path_name, cell.ranks, cell.strategy, settings=settings, run=run) as job:
        # With one rank, there is no torchrun that could outlive it: plain python is the rank itself.
        with time_limit(run):
            job.wait_until(late_enough, TIME_LIMIT)
        target = job.find_rank(rank)
        if target is None:
            raise RunError(f"{cell}: the job ended before it could be killed; see {log_of(run)}")
        target.kill()
        with time_limit(run):
            job.wait(TIME_LIMIT)
    ranks, strategy = cell.resumed
    finish(
        start(cell.path_name, ranks, strategy, settings=replace(settings, resume_from_checkpoint=str(run)), run=run),
        run,
    )


def start(path_name: str, ranks: int, strategy: str, *, settings: Settings, run: Path) -> TorchrunJob:
    """Return a job that trains into a run folder, or resumes the run in it."""
    output_dir = None if settings.resume_from_checkpoint else str(run)
    flags = as_flags(replace(settings, strategy=strategy, output_dir=output_dir))  # type: ignore[arg-type]
    command = torchrun_command(f"{PACKAGE}.{path_name}", flags, nproc_per_node=ranks)
    log = log_of(run, "resumed" if settings.resume_from_checkpoint else "")
    return TorchrunJob(command, environment={"OMP_NUM_THREADS": str(settings.threads)}, stdout=log, grace_seconds=0)


def finish(job: TorchrunJob, run: Path) -> None:
    """Run a job to its end.

    Raises:
        RunError: its exit status is not 0, or it takes too long.
    """
    with job, time_limit(run):
        status = job.wait(TIME_LIMIT)
    if status != 0:
        raise RunError(f"{run.name} failed with exit status {status}; see {job.stdout}")


@contextmanager
def time_limit(run: Path) -> Iterator[None]:
    """Turn a TimeoutError into a RunError."""
    try:
        yield
    except TimeoutError:
        raise RunError(f"{run.name}: still running after {TIME_LIMIT:.0f} s; see {run}*.log") from None


def log_of(run: Path, suffix: str = "") -> Path:
    """Return the file for a job's output."""
    return run.with_name(f"{run.name}{f'-{suffix}' if suffix else ''}.log")


def find_difference(hashes: Mapping[Cell, str], folder: Path) -> str | None:
    """Return the first difference between two runs of a training, or None if all its cells have one hash."""
    first, *others = hashes
    for other in others:
        if hashes[other] != hashes[first]:
            a, b = (read_run(folder / cell.folder_name) for cell in (first, other))
            # The hash also covers evaluations during training and learning rates.
            return first_difference(a, b) or f"evaluations.jsonl or steps.jsonl differs in {a.folder} and {b.folder}"
    return None


if __name__ == "__main__":
    sys.exit(run_program(main))
