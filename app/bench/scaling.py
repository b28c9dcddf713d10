"""Strong scaling: the time of a step with more ranks on this machine.

    python -m app.bench.scaling --csv reviews.csv --links 1:0.1 1:5
    python -m app.bench.scaling --ranks 1 2 4 --strategies ddp zero1 zero2 zero3

Runs of app.ddp_loop with 1, 2, 4 and 8 ranks divide the same batches, on this machine's GPUs. Without GPUs, the ranks
share the CPU, and with `--links` there are runs on two network namespaces with a link between them (needs root). Each
run is a job of its own, every one once per round, every second round in the opposite order. The time of a step is the
mean of `--steps` steps after the first 5; the table has the median over the rounds, with the range. Writes scaling.md
and scaling.json into `--output_dir`.
"""

from __future__ import annotations

from ..cli import OneLineParser, command_line, count
from ..program import Program, run_program
from ..settings import OF_A_STEP, STRATEGIES
from .two_nodes import Link, link


def add_arguments(parser: OneLineParser) -> None:
    parser.set_defaults(model="4x312", max_length=64, threads=1)
    add = parser.add_argument
    on_machine = "on this machine (default: 1 2 4 8; at most the number of GPUs)"
    add("--ranks", type=count, nargs="+", metavar="N", help=on_machine)
    shapes = "links between two nodes on this machine, as Gbit/s:milliseconds (Linux, root)"
    add("--links", type=link, nargs="*", metavar="RATE:DELAY", help=shapes)
    strategies = f"which of {', '.join(STRATEGIES)} to compare with ddp (default: ddp only)"
    add("--strategies", choices=STRATEGIES, nargs="+", metavar="NAME", help=strategies)
    add("--steps", type=count, default=10, metavar="N", help="timed steps of a run in each round")
    add("--rounds", type=count, default=3, metavar="N", help="rounds, of which the medians are used")


USED = OF_A_STEP - {"strategy", "cpu_offload", "param_dtype", "reduce_dtype"} | {"output_dir"}
PROGRAM = Program(__doc__, add_arguments, only=USED)
if __name__ == "__main__":
    PROGRAM.check_command_line()  # before torch is imported, which takes seconds

import argparse
import sys
from functools import partial
from typing import NamedTuple

import pandas as pd
import torch

from ..common.cores import usable_cores
from ..common.errors import UserError
from ..common.machine import describe_machine
from ..distributed.launcher import count_gpus
from ..jobs import flags_of
from ..runs.folder import create_folder
from ..runs.schema import RUNS
from .core import Page, format_seconds
from .jobs import alternate_jobs, time_steps
from .models import with_model_folder

DEFAULT_RANKS = (1, 2, 4, 8)


class Run(NamedTuple):
    """A training that is timed."""

    strategy: str
    ranks: int
    link: Link | None  # between two nodes; None: one node

    def __str__(self) -> str:
        return f"{self.strategy}, {self.ranks} rank(s)" + (f", {self.link}" if self.link else "")


def main() -> None:
    """Time runs of every configuration, all of which train the same batches, in alternating rounds."""
    settings, flags_of_program = PROGRAM.parse(sys.argv[1:])
    options = argparse.Namespace(**flags_of_program)
    gpus = count_gpus(settings.use_cpu)
    ranks = sorted(set(options.ranks or [n for n in DEFAULT_RANKS if n <= (gpus or n)]))
    if 0 < gpus < ranks[-1]:
        raise UserError(f"--ranks {ranks[-1]}: this machine has {gpus} GPU(s), and each rank needs one: add --use_cpu")
    strategies = dict.fromkeys(("ddp", *(options.strategies or ())))
    runs = [Run(strategy, n, None) for strategy in strategies for n in ranks]
    runs += [Run("ddp", 2, link) for link in dict.fromkeys(options.links or ())]
    if gpus and runs[-1].link:
        raise UserError("--links: two nodes on one machine share its CPU, but there are GPUs: add --use_cpu")
    for run in runs:
        if settings.train_batch_size % run.ranks:
            raise UserError(f"--train_batch_size {settings.train_batch_size} cannot be divided among {run.ranks} ranks")
    flags = flags_of(with_model_folder(settings))

    def train(run: Run, steps: int) -> pd.Series:
        given = [*flags, "--strategy", run.strategy]
        return time_steps("train", given, steps=steps, ranks=run.ranks, threads=settings.threads, link=run.link)

    train(runs[-1], 1)  # fills the cache, or reports a mistake before there is a folder
    facts = {"model": settings.model, "batch": f"{settings.train_batch_size} rows", "threads": f"{settings.threads}"}
    facts |= describe_machine(torch.device("cuda", 0) if gpus else torch.device("cpu")) | {"command": command_line()}
    page = Page("Scaling", facts, create_folder(settings.output_dir, RUNS / "scaling"))
    jobs = {str(run): partial(train, run, options.steps) for run in runs}
    times = alternate_jobs(jobs, options.rounds)["seconds"].unstack()[list(jobs)] / options.steps
    cores = "Each rank has a GPU." if gpus else f"All ranks share {len(usable_cores())} CPU core(s)."
    about = f"{cores} Medians, and the range, of {options.rounds} alternating rounds of {options.steps} steps."
    page.section("measured", "Strong scaling on this machine", about)
    page.numbers["seconds"] = times.to_dict("list")
    shown = {"step": times.median(), "lowest": times.min(), "highest": times.max()}
    table = pd.DataFrame(shown).map(format_seconds).rename_axis("run")
    if runs[0].ranks == 1:
        speedup = times.rdiv(times.iloc[:, 0], axis=0).median()  # T(1) / T(N), of the same round
        table["T(1) / T(N)"] = speedup.map("{:.2f}".format)
        table["efficiency"] = (speedup / [run.ranks for run in runs]).map("{:.0%}".format)
    page.table("Strong scaling", table)
    page.write("scaling")


if __name__ == "__main__":
    sys.exit(run_program(main))
