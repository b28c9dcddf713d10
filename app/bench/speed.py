"""Benchmark: the training paths compared with other ways to train the same model, in alternating jobs.

    python -m app.bench.speed --csv reviews.csv --ranks 2 --threads 1
    python -m app.bench.speed --model 4x312 --precision bf16 --recipes ddp_loop tutorial

The recipes train the same architecture, with random weights, on the same file with the same global batch: the complete
runs of app.ddp_loop and app.trainer_run, and two flat scripts in app/bench/recipes/, the loop of most tutorials (rows
padded to --max_length, random order, plain Adam, always fp32) and `Trainer` with its defaults. Training flags apply to
the first two; --max_length, the batch and the precision also to the others.

On a machine that does nothing else, each round trains with every recipe, in jobs of their own, every second round in
the opposite order. Starting, evaluating and the first steps do not count. Examples per second are real tokens per
second, divided by the mean length of a review. Writes speed.md and speed.json.
"""

from __future__ import annotations

from ..cli import OneLineParser, command_line, count, program_name
from ..program import Program, run_program, select_precision
from ..settings import OF_A_STEP, Settings
from .models import measure_tiny_bert

RECIPES = ("ddp_loop", "trainer_run", "tutorial", "trainer-defaults")


def add_arguments(parser: OneLineParser) -> None:
    measure_tiny_bert(parser)
    add, names = parser.add_argument, ", ".join(RECIPES)
    about = f"which of {names}, of which the first is compared with the others; default: all"
    add("--recipes", nargs="+", choices=RECIPES, default=RECIPES, metavar="NAME", help=about)
    add("--ranks", type=count, default=2, metavar="N", help="ranks of each job")
    add("--steps", type=count, default=60, metavar="N", help="timed optimizer steps of each job")
    add("--rounds", type=count, default=5, metavar="N", help="rounds, with a job of each recipe")


PROGRAM = Program(__doc__, add_arguments, only=OF_A_STEP | {"output_dir"})
if __name__ == "__main__":
    PROGRAM.check_command_line()  # before torch is imported, which takes seconds

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from ..common.errors import UserError
from ..common.machine import describe_machine
from ..distributed.environment import default_threads, started_by_torchrun
from ..distributed.launcher import count_gpus
from ..jobs import flags_of
from ..runs.folder import create_folder
from ..runs.schema import MODEL_FOLDER, RUNS, SETTINGS
from .core import Page, compared
from .jobs import RUN_FLAGS, alternate_jobs, run_job, time_steps
from .models import with_model_folder

OWN = {"ddp_loop": "train", "trainer_run": "trainer"}  # the programs of `samebits`
SCRIPTS = Path(__file__).parent / "recipes"
PRECISIONS = ("fp32", "bf16")


def main() -> int:
    settings, flags = PROGRAM.parse(sys.argv[1:])
    options = argparse.Namespace(**flags)
    if started_by_torchrun():
        raise UserError(f"it starts jobs itself: use python -m {program_name()} --ranks N, without torchrun")
    settings = select_precision(settings)
    if settings.precision not in PRECISIONS:
        raise UserError(f"--precision {settings.precision}: the recipes train in {' or '.join(PRECISIONS)}")
    recipes, ranks = list(dict.fromkeys(options.recipes)), options.ranks
    threads = settings.threads or default_threads(settings.logical_ranks or ranks)
    settings = with_model_folder(replace(settings, csv=str(settings.csv_path), threads=threads))
    device = torch.device("cuda", 0) if count_gpus(settings.use_cpu) else torch.device("cpu")
    with tempfile.TemporaryDirectory(prefix="samebits-") as name:
        # Trains one step, which fills the cache, or reports a mistake before anything is measured. The other recipes
        # train the model of this run.
        run = Path(name, "run")
        flags_of_run = [*flags_of(settings), *RUN_FLAGS, "--max_steps", 1, "--output_dir", run]
        run_job("train", flags_of_run, ranks=ranks, log=Path(name, "log"))
        folder = create_folder(settings.output_dir, RUNS / "speed")
        facts = {"model": settings.model, "ranks": str(ranks), "threads": f"{threads} per rank"}
        page = Page("Speed", facts | describe_machine(device) | {"command": command_line()}, folder)
        jobs = {recipe: partial(time_recipe, recipe, settings, run, options=options) for recipe in recipes}
        measured = alternate_jobs(jobs, options.rounds)
        page.section("speed", "Recipes", f"{options.rounds} rounds of {options.steps} steps.")
        show(page, measured, recipes)
        page.write("speed")
    return 0


def time_recipe(recipe: str, settings: Settings, run: Path, *, options: argparse.Namespace) -> pd.Series:
    """Train with a recipe.

    Args:
        run: a run of the same model with the same batches.
    """
    if recipe in OWN:
        program: str | Path = OWN[recipe]
        flags: list[Any] = flags_of(settings)
    else:
        program = SCRIPTS / f"{recipe.replace('-', '_')}.py"
        batch = json.loads((run / SETTINGS.name).read_text(encoding="utf-8"))["train_batch_size"] // options.ranks
        flags = [settings.csv, settings.text_column, settings.label_column, run / MODEL_FOLDER, settings.max_length]
        flags += [batch, settings.precision]
    return time_steps(program, flags, steps=options.steps, ranks=options.ranks, threads=settings.threads or 0)


def show(page: Page, measured: pd.DataFrame, recipes: list[str]) -> None:
    """Show the speed of each recipe, compared with the first one.

    Args:
        measured: the sums over the steps of a job, by round and job.
    """
    # Jobs train on reviews of different lengths: examples per second are those of reviews of the mean length.
    tokens = (measured["tokens"] / measured["seconds"]).unstack()[recipes]
    rates = tokens * measured["examples"].sum() / measured["tokens"].sum()
    table = compared(1 / rates).drop(columns="time per step").rename_axis("recipe")
    table.insert(0, "examples/s", rates.median().map("{:.1f}".format))
    padded = measured.groupby("job")[["tokens", "padded_tokens"]].sum()
    table["padding"] = (1 - padded["tokens"] / padded["padded_tokens"]).map("{:.1%}".format)
    page.table("Speed", table, f"relative: how many times as fast {recipes[0]} is.")
    rounds = {str(key): row.to_dict() for key, row in measured.iterrows()}
    page.numbers |= {"examples_per_second": rates.to_dict("list"), "rounds": rounds}


if __name__ == "__main__":
    sys.exit(run_program(main))
