"""Benchmark: seconds and memory of a start, from 10,000 to 1,000,000 rows.

    python -m app.bench.growth --csv reviews.csv
    python -m app.bench.growth --rows 10000 100000 --ranks 4

For each number of rows, writes a CSV (the reviews of `--csv`, repeated and numbered) and trains one step of `tiny-bert`
on it with app.ddp_loop, on the CPU: first with an empty cache ("cold"), then again ("warm"). Both jobs also evaluate
the test rows, a tenth of all rows. Seconds are counted from the start of torchrun to the first step. Memory is the peak
of each rank's private memory: it does not include mapped files, which the ranks share and whose pages the kernel may
drop. Writes growth.md and growth.json into `--output_dir`.
"""

from __future__ import annotations

from ..cli import OneLineParser, command_line, count
from ..program import Program, run_program

SETTINGS = ("csv", "output_dir")


def add_arguments(parser: OneLineParser) -> None:
    rows, sizes = [10_000, 100_000, 1_000_000], "sizes (default: 10000 100000 1000000)"
    parser.add_argument("--rows", type=count, nargs="+", default=rows, metavar="N", help=sizes)
    parser.add_argument("--ranks", type=count, default=2, metavar="N", help="ranks of each job")


PROGRAM = Program(__doc__, add_arguments, only=SETTINGS)
if __name__ == "__main__":
    PROGRAM.check_command_line()  # before torch is imported, which takes seconds

import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import torch

from ..common.errors import RunError
from ..common.formats import MIB
from ..common.machine import describe_machine
from ..common.paths import PACKAGE
from ..data.reviews import ReviewTable, clean
from ..data.sources import open_file
from ..distributed.environment import default_threads
from ..distributed.launcher import TorchrunJob, torchrun_command
from ..runs.folder import create_folder
from ..runs.schema import RUNS, STEPS
from ..setting_groups import TINY_BERT
from .core import Page

POLL_SECONDS = 0.1
FLAGS = (
    *("--model", TINY_BERT, "--use_cpu", "--max_steps", "1", "--logging_steps", "1"),
    *("--eval_strategy", "no", "--save_strategy", "no"),
)


def main() -> int:
    settings, own_flags = PROGRAM.parse(sys.argv[1:])
    table, ranks = clean({"train": open_file(settings.csv_path, encoding=settings.encoding)}), own_flags["ranks"]
    folder = create_folder(settings.output_dir, RUNS / "growth")
    facts = {"model": TINY_BERT, "ranks": str(ranks), **describe_machine(torch.device("cpu"))}
    page = Page("Growth", facts | {"command": command_line()}, folder)
    page.section("growth", "From the start of a job to its first step")
    for n in sorted(set(own_flags["rows"])):
        with tempfile.TemporaryDirectory(prefix="growth-", dir=folder) as name:
            path = Path(name, "reviews.csv")
            write_rows(path, table, n)
            for kind in ("cold", "warm"):
                log = folder / f"{n}-{kind}.log"
                page.numbers[f"{n}, {kind}"] = measure(path, Path(name, kind), ranks=ranks, log=log)
    page.table("starts", pd.DataFrame(page.numbers).T.rename_axis("rows, start"))
    page.write("growth")
    return 0


def write_rows(path: Path, table: ReviewTable, n: int) -> None:
    """Write the reviews `n / len(table)` times, each with the number of its row, so that no two are the same."""
    labels = np.array(table.class_names)[table.labels]
    # Shuffled, because the first rows of the file may be of one class.
    reviews = pd.DataFrame({"label": labels, "review": list(table.texts)}).sample(frac=1, random_state=0)
    rows = reviews.iloc[np.arange(n) % len(reviews)]
    rows.assign(review=[f"{number} {text}" for number, text in enumerate(rows["review"])]).to_csv(path, index=False)


def measure(path: Path, run: Path, *, ranks: int, log: Path) -> dict[str, Any]:
    """Train one step and evaluate. The jobs on one file share a cache next to it.

    Raises:
        RunError: the job failed.
    """
    flags = ["--csv", path, "--cache_dir", path.parent / "cache", "--output_dir", run, *FLAGS]
    command = torchrun_command(f"{PACKAGE}.ddp_loop", flags, nproc_per_node=ranks)
    started, peaks = time.time(), dict.fromkeys(range(ranks), 0)
    with TorchrunJob(command, environment={"OMP_NUM_THREADS": str(default_threads(ranks))}, stdout=log) as job:
        while job.torchrun.poll() is None:
            for rank in range(ranks):
                with suppress(psutil.Error):  # it has ended
                    if (process := job.find_rank(rank)) is not None:
                        memory = process.memory_info()
                        peaks[rank] = max(peaks[rank], memory.rss - getattr(memory, "shared", 0))
            time.sleep(POLL_SECONDS)
        if job.torchrun.wait():
            raise RunError(f"a job failed: see {log}")
    first_step = (run / STEPS.name).stat().st_mtime - started  # its only line
    return {"seconds": round(first_step, 1), "MiB of each rank": [round(peak / MIB) for peak in peaks.values()]}


if __name__ == "__main__":
    sys.exit(run_program(main))
