"""Walk both roads with one set of settings and compare, or compare two runs that are there.

Train both on the same reviews, two processes each (every training flag of app.ddp_loop is accepted):

    python -m app.compare
    python -m app.compare --nproc_per_node 4 --csv reviews.csv --num_train_epochs 1

Compare two finished runs, which nothing but their folders is known of:

    python -m app.compare runs/ddp_loop/latest runs/trainer_run/latest

The figures are printed and written as comparison.json and comparison.md into --output_dir.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from app.distributed.launcher import torchrun
from app.errors import UserError
from app.preparation import read_and_split
from app.report.comparison import compare_runs
from app.report.runs import read_run
from app.report.write import write_comparison
from app.run_record import RUNS, create_folder
from app.settings import Settings, as_flags, settings_parser

ROADS = ("ddp_loop", "trainer_run")


def main() -> int:
    try:
        runs, nproc_per_node, settings = parse()
        if runs:
            loaded = [read_run(run) for run in runs]
            comparison = compare_runs(*loaded)
            folder = create_folder(settings.output_dir, RUNS / "comparisons")
        else:
            read_and_split(settings, nproc_per_node)  # a mistake in the data is one line here, not one from each rank
            folder = create_folder(settings.output_dir, RUNS / "comparisons")
            for road in ROADS:
                status = train(road, settings, nproc_per_node, folder)
                if status != 0:
                    print(f"error: {road} failed; what it left is in {folder / road}", file=sys.stderr)
                    return 1
            comparison = compare_runs(*(read_run(folder / road) for road in ROADS))
        print()
        print(write_comparison(comparison, folder))
        print(f"written to {folder}/comparison.md and comparison.json")
        return 0
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: everything that was started has ended", file=sys.stderr)
        return 130


def parse() -> tuple[list[Path], int, Settings]:
    parser = settings_parser(__doc__)
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="folders of two finished runs; without them both are made"
    )
    parser.add_argument("--nproc_per_node", type=int, default=2, help="processes that train together")
    values = parser.values(sys.argv[1:])
    runs, nproc_per_node = values.pop("runs"), values.pop("nproc_per_node")
    if len(runs) not in (0, 2):
        raise UserError(f"{len(runs)} run folder given: name two, or none to train both")
    if nproc_per_node < 1:
        raise UserError(f"--nproc_per_node {nproc_per_node}: must be 1 or more")
    return [Path(run) for run in runs], nproc_per_node, Settings(**values)


def train(road: str, settings: Settings, nproc_per_node: int, folder: Path) -> int:
    """One road in a torchrun job of its own; returns its exit status."""
    print(f"\n--- {road} ---", flush=True)
    flags = as_flags(dataclasses.replace(settings, output_dir=str(folder / road)))
    return torchrun(f"app.{road}", flags, nproc_per_node, settings.threads)


if __name__ == "__main__":
    sys.exit(main())
