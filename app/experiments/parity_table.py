"""Check that both paths are bitwise identical for every combination of ranks, accumulation, sampling and precision.

    python -m app.experiments.parity_table
    python -m app.experiments.parity_table --only 2,4,random,bf16 --only 3,1,group_by_length,fp32 --csv reviews.csv

Each of the 36 cells trains both paths for two epochs of about a hundred steps on the real CSV, with dropout and with
evaluations during training, and compares them as `app.compare --assert_equal` does. The exit status is 1 unless all
cells are identical. Training flags are passed on to every run; on GPUs, --deterministic is set. To check a cell
quickly, shorten the runs:

    python -m app.experiments.parity_table --only 2,1,random,bf16 --csv data/sample_reviews.csv \\
        --train_batch_size 24 --max_steps 6 --eval_steps 4 --validation_size 0.05

On CPUs that emulate bf16, a complete cell with bf16 takes minutes, and a shortened one seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import product

from ..cli import OneLineParser, settings_parser
from ..common.errors import UserError, shorten
from ..common.files import write_text
from ..distributed.processes import check_gpus
from ..program import run_program
from ..report.bitwise import first_difference
from ..runs.folder import create_folder
from ..runs.reader import Run
from ..runs.schema import RUNS
from ..settings import Settings
from .train_pair import deterministic_on_gpus, train_pair

RANKS, ACCUMULATION_STEPS = (1, 2, 3), (1, 2, 4)
SAMPLING, PRECISION = ("random", "group_by_length"), ("fp32", "bf16")
# With the real CSV's 7,765 reviews these make 2 epochs of 109 steps. A batch of 48 can be divided among every number of
# ranks x accumulation steps.
DEFAULTS = {
    "train_batch_size": 48,
    "validation_size": 0.25,
    "num_train_epochs": 2.0,
    "max_length": 32,
    "dropout": 0.1,
    "eval_strategy": "steps",
    "eval_steps": 75,
    "save_strategy": "no",
    "disable_tqdm": True,
}
HEADER = (
    "| ranks | accumulation | sampling | precision | steps | evaluations | first difference |\n"
    "|---|---|---|---|---|---|---|\n"
)
Cell = tuple[int, int, str, str]


def main() -> int:
    return run_program(_main)


def _main() -> int:
    cells, settings = parse()
    folder = create_folder(settings.output_dir, RUNS / "parity")
    rows, identical = [], 0
    for number, cell in enumerate(cells, start=1):
        started = time.monotonic()
        a, b = train_pair(cell_settings(cell, settings), cell[0], folder / "-".join(map(str, cell)))
        difference = find_difference(a, b)
        rows.append(table_row([*cell, len(a.steps), len(a.evaluations), difference or "none"]))
        identical += difference is None
        print(f"\ncell {number} of {len(cells)}, {time.monotonic() - started:.0f} s: {rows[-1]}", flush=True)
        table = f"{HEADER}{''.join(rows)}\nbitwise identical in both paths: {identical} of {len(rows)} cells\n"
        write_text(folder / "parity.md", table)
    print(f"\n{table}\nwritten to {folder}/parity.md")
    return 0 if identical == len(cells) else 1


def add_arguments(parser: OneLineParser) -> None:
    """Add the flags of this program."""
    parser.add_argument(
        "--only", action="append", metavar="RANKS,ACCUMULATION,SAMPLING,PRECISION", help="train this cell; repeatable"
    )


def parse() -> tuple[list[Cell], Settings]:
    """Return the cells to train, by default all, and the settings that they share.

    Raises:
        UserError: a cell that is not in the table, more ranks than GPUs, or an invalid flag.
    """
    parser = settings_parser(__doc__, add_arguments)
    parser.set_defaults(**DEFAULTS)
    values = parser.values(sys.argv[1:])
    cells = {",".join(map(str, cell)): cell for cell in product(RANKS, ACCUMULATION_STEPS, SAMPLING, PRECISION)}
    names = values.pop("only") or list(cells)
    for name in names:
        if name not in cells:
            factors = "; ".join(
                f"{factor} one of {', '.join(map(str, levels))}"
                for factor, levels in (
                    ("RANKS", RANKS),
                    ("ACCUMULATION", ACCUMULATION_STEPS),
                    ("SAMPLING", SAMPLING),
                    ("PRECISION", PRECISION),
                )
            )
            raise UserError(f"--only {shorten(name)}: must be RANKS,ACCUMULATION,SAMPLING,PRECISION: {factors}")
    settings = deterministic_on_gpus(Settings(**values))
    check_gpus(max(cells[name][0] for name in names), settings.use_cpu)
    return [cells[name] for name in names], settings


def cell_settings(cell: Cell, settings: Settings) -> Settings:
    """Return the settings of a cell's runs."""
    _, accumulation_steps, sampling, precision = cell
    return replace(
        settings,
        gradient_accumulation_steps=accumulation_steps,
        train_sampling_strategy=sampling,  # type: ignore[arg-type]
        precision=precision,  # type: ignore[arg-type]
    )


def find_difference(a: Run, b: Run) -> str | None:
    """Return the first difference between two runs, including the evaluations during training, or None."""
    difference = first_difference(a, b)
    if difference is None and a.evaluations != b.evaluations:
        return "an evaluation during training"
    return difference


def table_row(cells: Iterable[object]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |\n"


if __name__ == "__main__":
    sys.exit(main())
