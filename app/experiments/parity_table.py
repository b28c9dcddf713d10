"""Are the two roads the same training, to the bit? Every combination of ranks, accumulation, sampling and precision.

    python -m app.experiments.parity_table
    python -m app.experiments.parity_table --only 2,4,random,bf16 --only 3,1,group_by_length,fp32 --csv reviews.csv

Each cell trains app.ddp_loop and app.trainer_run for two epochs of about a hundred steps, with dropout and evaluations
in mid-training, and says what `app.compare --assert_equal` says of them. Exits 1 unless all are equal. Any training
flag given goes to all runs.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from itertools import product
from pathlib import Path

from app.cli import settings_parser
from app.errors import RunError, UserError
from app.experiments.train_pair import PATHS, train
from app.files import write_text
from app.report.bitwise import first_difference
from app.runs.folder import create_folder
from app.runs.schema import RUNS
from app.settings import Settings

RANKS, ACCUMULATION = (1, 2, 3), (1, 2, 4)
SAMPLING, PRECISION = ("random", "group_by_length"), ("fp32", "bf16")
# Of the real CSV's 7,765 reviews these make 2 epochs of 109 steps; 48 rows can be divided among all ranks x
# accumulation steps.
RECIPE = {
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
HEAD = (
    "| ranks | accumulation | sampling | precision | steps | evaluations | verdict |\n|---|---|---|---|---|---|---|\n"
)
Cell = tuple[int, int, str, str]


def main() -> int:
    try:
        cells, settings = parse()
        folder = create_folder(settings.output_dir, RUNS / "parity")
        rows, equal = [], 0
        for number, cell in enumerate(cells, start=1):
            started = time.monotonic()
            row, same = compare_cell(cell, settings, folder)
            rows.append(row)
            equal += same
            print(f"\ncell {number} of {len(cells)}, {time.monotonic() - started:.0f} s: {row}", flush=True)
            table = f"{HEAD}{''.join(rows)}\n{equal} of {len(rows)} cells equal to the bit\n"
            write_text(folder / "parity.md", table)
        print(f"\n{table}\nwritten to {folder}/parity.md")
        return 0 if equal == len(cells) else 1
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except RunError as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parse() -> tuple[list[Cell], Settings]:
    """The cells to fill, all unless some are named, and what all runs have in common.

    Raises:
        UserError: a cell that is none of the table's, or a wrong flag.
    """
    parser = settings_parser(__doc__)
    parser.set_defaults(**RECIPE)
    parser.add_argument("--only", action="append", metavar="RANKS,ACCUMULATION,SAMPLING,PRECISION", help="this cell")
    values = parser.values(sys.argv[1:])
    cells = list(product(RANKS, ACCUMULATION, SAMPLING, PRECISION))
    named = {",".join(map(str, cell)): cell for cell in cells}
    asked = values.pop("only") or list(named)
    for name in asked:
        if name not in named:
            raise UserError(f"--only {name}: no such cell; the first one is {next(iter(named))}")
    return [named[name] for name in asked], Settings(**values)


def compare_cell(cell: Cell, settings: Settings, folder: Path) -> tuple[str, bool]:
    """The table's row, and whether the two roads are equal to the bit.

    Raises:
        RunError: a road failed.
    """
    ranks, accumulation, sampling, precision = cell
    mine = dataclasses.replace(
        settings,
        gradient_accumulation_steps=accumulation,
        train_sampling_strategy=sampling,  # type: ignore[arg-type]
        precision=precision,  # type: ignore[arg-type]
        bf16=False,
    )
    place = folder / "-".join(map(str, cell))
    a, b = (train(road, mine, ranks, place) for road in PATHS)
    apart = first_difference(a, b)
    if apart is None and a.evaluations != b.evaluations:
        apart = "an evaluation in mid-training"
    row = f"| {' | '.join(map(str, cell))} | {len(a.steps)} | {len(a.evaluations)} | {apart or 'equal'} |\n"
    return row, apart is None


if __name__ == "__main__":
    sys.exit(main())
