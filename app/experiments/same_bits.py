"""Prove that the results do not depend on the path, the number of ranks, the strategy, or interruptions.

    python -m app.experiments.same_bits --csv reviews.csv
    python -m app.experiments.same_bits --bf16 --gradient_accumulation_steps 2 --ranks 1 2 --strategies ddp zero3

Each cell of {ddp_loop, trainer_run} x {1, 2, 4 ranks} x {ddp, zero1, zero2, zero3} x {uninterrupted, killed} is trained
by real torchrun jobs, with the same settings otherwise. A killed run loses a rank to SIGKILL after one of its
checkpoints, and is resumed with another number of ranks and another strategy. One hash is printed per cell: SHA-256 of
the final weights, the losses, gradient norms and learning rates of all steps, the evaluations, and the predictions. The
exit status is 1 unless all hashes are equal. Any training flag applies to all cells. On GPUs, --deterministic is set.

On CPUs that emulate bf16, a run with bf16 takes minutes, unless --max_steps and --train_batch_size are smaller.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from ..cli import CommandLine, OneLineParser, as_flags, count
from ..common.errors import RunError
from ..common.files import check_exists, write_text
from ..common.formats import markdown_table
from ..common.paths import PACKAGE
from ..distributed.launcher import TorchrunJob, count_gpus, torchrun_command
from ..jobs import PATHS
from ..program import run_program
from ..runs.folder import create_folder
from ..runs.hashes import DIGITS, hash_run
from ..runs.schema import CHECKPOINTS, RUNS
from ..settings import STRATEGIES, TYPES, Settings

INTERRUPTIONS = ("uninterrupted", "killed")
# Checkpoints in the middle of an epoch and between two evaluations. One thread per rank, because the number of threads
# affects rounding and a machine may have fewer cores than ranks.
DEFAULTS: dict[str, Any] = {
    **{"logical_ranks": 4, "dropout": 0.1, "max_steps": 60, "max_length": 32, "threads": 1, "disable_tqdm": True},
    **{"validation_size": 0.1, "eval_strategy": "steps", "eval_steps": 25, "save_strategy": "steps", "save_steps": 10},
}
OF_A_CELL = {"strategy", "resume_from_checkpoint", "dry_run"}  # no flags: a cell decides
TIME_LIMIT = 900.0  # seconds; a job that takes longer is considered to hang
HEADER = ("path", "ranks", "strategy", "interruption", "hash")


@dataclass(frozen=True)
class Cell:
    """One way to train the same model."""

    path_name: str
    ranks: int
    strategy: str
    resumed: tuple[int, str] | None = None  # the number of ranks and the strategy after the interruption

    @property
    def folder_name(self) -> str:
        return f"{self.path_name}-{self.ranks}-{self.strategy}{'-killed' if self.resumed else ''}"

    def row(self, hash_: str) -> list[str]:
        """Return the cell's row of the table."""
        resumed = f"killed, resumed with {self.resumed[0]} x {self.resumed[1]}" if self.resumed else "none"
        return [self.path_name, str(self.ranks), self.strategy, resumed, hash_[:DIGITS]]


def main() -> int:
    options, settings = parse()
    folder = create_folder(settings.output_dir, RUNS / "same_bits")
    rng = random.Random(settings.seed)
    hashes: dict[Cell, str] = {}
    cells = build_cells(options, rng)
    for number, cell in enumerate(cells, start=1):
        train_cell(cell, with_strategy(settings, cell.strategy), folder, rng=rng)
        hashes[cell] = hash_run(folder / cell.folder_name)
        print(f"{number} of {len(cells)}: {' | '.join(cell.row(hashes[cell]))}", flush=True)
        write_text(folder / "same_bits.md", as_markdown(hashes))
    print(f"\n{as_markdown(hashes)}\nwritten to {folder}/same_bits.md")
    first = cells[0]
    for other in (cell for cell in cells if hashes[cell] != hashes[first]):
        runs = f"{folder / first.folder_name} {folder / other.folder_name}"
        print(f"where they differ: python -m {PACKAGE}.compare {runs} --assert_equal")
        return 1
    return 0


def add_arguments(parser: OneLineParser) -> None:
    parser.set_defaults(**DEFAULTS)
    parser.add_argument("--ranks", type=count, nargs="+", default=[1, 2, 4], metavar="N", help="numbers of ranks")
    for name, choices in {"paths": PATHS, "strategies": STRATEGIES, "interruptions": INTERRUPTIONS}.items():
        about = f"of {', '.join(choices)}; default: all"
        parser.add_argument(f"--{name}", nargs="+", choices=choices, default=list(choices), metavar="NAME", help=about)


def parse() -> tuple[argparse.Namespace, Settings]:
    given = CommandLine(__doc__, add_arguments, only=TYPES.keys() - OF_A_CELL).parse_given(sys.argv[1:])
    names = ("ranks", "paths", "strategies", "interruptions")
    options = argparse.Namespace(**{name: given.pop(name) for name in names})
    settings = Settings(**given | {"strategy": options.strategies[0]})
    for strategy in options.strategies:
        with_strategy(settings, strategy)  # a mistake, if it rejects another setting
    check_exists(settings.csv_path)
    if count_gpus(settings.use_cpu):  # GPUs otherwise may round differently each time
        settings = replace(settings, deterministic=True)
    return options, settings


def build_cells(options: argparse.Namespace, rng: random.Random) -> list[Cell]:
    """Return all cells. Each killed run is resumed with another number of ranks and strategy, if there are others."""
    cells, places = [], list(product(options.ranks, options.strategies))
    for path_name, (ranks, strategy), interruption in product(options.paths, places, options.interruptions):
        others = [place for place in places if place != (ranks, strategy)] or places
        elsewhere = [place for place in others if place[0] != ranks and place[1] != strategy] or others
        resumed = rng.choice(elsewhere) if interruption == "killed" else None
        cells.append(Cell(path_name, ranks, strategy, resumed))
    return cells


def train_cell(cell: Cell, settings: Settings, folder: Path, *, rng: random.Random) -> None:
    """Train one cell into its folder. The settings have its strategy.

    Raises:
        RunError: a job failed, took too long, or ended before it could be killed.
    """
    run = folder / cell.folder_name
    job = build_job(cell.path_name, cell.ranks, replace(settings, output_dir=str(run)), log=Path(f"{run}.log"))
    if cell.resumed is not None:
        rank, step = rng.randrange(cell.ranks), settings.save_steps * rng.randint(1, 2)
        with job:
            job.wait_until((run / CHECKPOINTS / f"checkpoint-{step}").exists)
            target = job.find_rank(rank)
            if target is None:
                raise RunError(f"{run.name} ended before it could be killed after step {step}; see {job.stdout}")
            target.kill()
            job.torchrun.wait()
        ranks, strategy = cell.resumed
        resumed = replace(with_strategy(settings, strategy), output_dir=None, resume_from_checkpoint=str(run))
        job = build_job(cell.path_name, ranks, resumed, log=Path(f"{run}-resumed.log"))
    with job:
        wait_for_success(job)


def with_strategy(settings: Settings, strategy: str) -> Settings:
    return replace(settings, strategy=strategy)  # type: ignore[arg-type]


def build_job(path_name: str, ranks: int, settings: Settings, *, log: Path, max_restarts: int = 0) -> TorchrunJob:
    torchrun_flags = ["--standalone", f"--max-restarts={max_restarts}"]
    program, flags = f"{PACKAGE}.{path_name}", as_flags(settings)
    command = torchrun_command(program, flags, nproc_per_node=ranks, torchrun_flags=torchrun_flags)
    return TorchrunJob(command, environment={"OMP_NUM_THREADS": str(settings.threads)}, stdout=log)


def wait_for_success(job: TorchrunJob) -> None:
    """Wait for the end of a job. One that takes too long is considered to hang."""
    try:
        status = job.torchrun.wait(TIME_LIMIT)
    except subprocess.TimeoutExpired:
        raise RunError(f"still running after {TIME_LIMIT:.0f} s; see {job.stdout}") from None
    if status != 0:
        raise RunError(f"a job failed with exit status {status}; see {job.stdout}")


def as_markdown(hashes: dict[Cell, str]) -> str:
    """Return the table, and whether all hashes are equal."""
    rows = [cell.row(hash_) for cell, hash_ in hashes.items()]
    different = len(set(hashes.values()))
    if different == 1:
        conclusion = f"all {len(hashes)} cells have one hash: bitwise identical"
    else:
        conclusion = f"{different} different hashes in {len(hashes)} cells: not bitwise identical"
    return f"{markdown_table(HEADER, rows, text_columns=len(HEADER))}\n{conclusion}\n"


if __name__ == "__main__":
    sys.exit(run_program(main))
