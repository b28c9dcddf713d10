"""Benchmark: the training paths compared with other ways to train the same model, in alternating jobs.

    python -m app.bench.speed --csv reviews.csv --ranks 2 --threads 1
    python -m app.bench.speed --models tiny-bert 4x312 12x768
    python -m app.bench.speed --recipes ddp_loop ddp_loop-bf16 tutorial --steps 30

Prints examples per second, padding and MFU, and writes speed.html, .md and .json into `--output_dir` (default: a new
folder in runs/speed/). docs/speed.md describes the recipes and how they are measured.
"""

from __future__ import annotations

if __name__ == "__main__":
    from ..program import check_command_line
    from .flags import add_speed_flags

    check_command_line(__doc__, add_speed_flags)

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from ..cli import as_flags, command_line, parse_flags, program_name
from ..common.errors import UserError
from ..common.machine import describe_machine
from ..distributed.environment import default_threads, started_by_torchrun
from ..distributed.processes import count_gpus
from ..program import run_program
from ..runs.folder import create_folder
from ..runs.schema import MODEL_FOLDER, RUNS, SETTINGS
from ..setting_groups import TINY_BERT
from ..settings import Settings
from .core import Page
from .flags import BF16, RECIPES, SHORT_NAMES, add_speed_flags
from .jobs import RUN_FLAGS, alternate_jobs, run_quietly, time_steps
from .models import model_folder

OWN = {"ddp_loop": "train", "trainer_run": "trainer"}  # the programs of `samebits`
SCRIPTS = Path(__file__).parent / "recipes"
Job = Callable[[], pd.Series]


def main() -> int:
    settings, flags = parse_flags(__doc__, sys.argv[1:], add_speed_flags)
    options = argparse.Namespace(**flags)
    if started_by_torchrun():
        raise UserError(f"it starts jobs itself: use python -m {program_name()} --ranks N, without torchrun")
    if options.models and settings.model != TINY_BERT:
        raise UserError("--models and --model exclude each other: give only one of them")
    recipes = [name for name in RECIPES if options.recipes is None or name in options.recipes]
    threads = settings.threads or default_threads(settings.logical_ranks or options.ranks)
    settings = replace(settings, csv=str(settings.csv_path), threads=threads)
    with tempfile.TemporaryDirectory(prefix="samebits-") as name:
        models = dict.fromkeys(options.models or [settings.model])
        folders = {model: Path(name, str(number)) for number, model in enumerate(models)}
        # Trains one step of each model, which fills the cache, or reports a mistake before anything is measured.
        of_models = {model: prepare(model, settings, folder, ranks=options.ranks) for model, folder in folders.items()}
        device = torch.device("cuda", 0) if count_gpus(settings.use_cpu) else torch.device("cpu")
        facts = {"ranks": str(options.ranks), "threads": f"{threads} per rank"} | describe_machine(device)
        folder = create_folder(settings.output_dir, RUNS / "speed")
        page = Page("Speed", facts | {"command": command_line()}, folder)
        for model, of_model in of_models.items():
            run = folders[model] / "run"
            jobs = {recipe: recipe_job(recipe, of_model, run, options=options) for recipe in recipes}
            for precision in sorted({precision_of(recipe) for recipe in recipes}):
                jobs[precision] = partial(measure_peak, precision, options.ranks, threads)
            measured = alternate_jobs(jobs, options.rounds)
            about = f"{options.rounds} rounds of {options.steps} steps. docs/speed.md describes the recipes."
            page.section(model, SHORT_NAMES.get(model, model), about)
            show(page, measured, recipes, parameters=count_parameters(run / MODEL_FOLDER))
            page.write("speed")
    return 0


def prepare(model: str, settings: Settings, folder: Path, *, ranks: int) -> Settings:
    """Train one step, and keep the run: its model folder is what the other recipes train."""
    settings = replace(settings, model=model_folder(model, folder / "untrained"), output_dir=None)
    folder.mkdir(exist_ok=True)
    flags = [*own_flags(settings), *RUN_FLAGS, "--max_steps", 1, "--output_dir", folder / "run"]
    run_quietly("train", flags, folder / "log", ranks=ranks)
    return settings


def own_flags(settings: Settings) -> list[str]:
    return [*as_flags(settings), f"--model={settings.model}"]


def recipe_job(recipe: str, settings: Settings, run: Path, *, options: argparse.Namespace) -> Job:
    """Return the job that trains with a recipe.

    Args:
        run: a run of the same model with the same batches.
    """
    name, precision = recipe.removesuffix(BF16), precision_of(recipe)
    if name in OWN:
        program: str | Path = OWN[name]
        flags: list[Any] = [*own_flags(settings), "--precision", precision]
    else:
        program = SCRIPTS / f"{name.replace('-', '_')}.py"
        batch = json.loads((run / SETTINGS.name).read_text(encoding="utf-8"))["train_batch_size"] // options.ranks
        flags = [settings.csv, settings.text_column, settings.label_column, run / MODEL_FOLDER, settings.max_length]
        flags += [batch, precision]
    return partial(time_steps, program, flags, steps=options.steps, ranks=options.ranks, threads=settings.threads)


def precision_of(recipe: str) -> str:
    return "bf16" if recipe.endswith(BF16) else "fp32"


def measure_peak(precision: str, ranks: int, threads: int) -> pd.Series:
    """Return the peak of the devices of all ranks together, in FLOP/s."""
    with tempfile.TemporaryDirectory(prefix="samebits-") as name:
        output = Path(name, "peak.json")
        run_quietly(SCRIPTS / "peak.py", [precision, output], Path(name, "log"), ranks=ranks, threads=threads)
        return pd.Series(json.loads(output.read_text()))


def count_parameters(folder: Path) -> int:
    """Return the number of a model's parameters, without embeddings."""
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(folder))
    return int(model.num_parameters(exclude_embeddings=True))


def show(page: Page, measured: pd.DataFrame, recipes: list[str], *, parameters: int) -> None:
    """Show the speed of each recipe, and how many times as fast those of this project are.

    Args:
        measured: the sums over the steps of a job, or the peak of the devices, by round and job.
    """
    of_recipes = measured.loc[(slice(None), recipes), :]
    # Jobs train on reviews of different lengths: examples per second are those of reviews of the mean length.
    tokens = (of_recipes["tokens"] / of_recipes["seconds"]).unstack()[recipes]
    rates = tokens * of_recipes["examples"].sum() / of_recipes["tokens"].sum()
    padded = of_recipes.groupby("job")[["tokens", "padded_tokens"]].sum()
    table = pd.DataFrame({"examples/s": rates.median(), "lowest": rates.min(), "highest": rates.max()}).map(
        "{:.1f}".format
    )
    table["tokens/s"] = tokens.median().map("{:,.0f}".format)
    table["padding"] = (1 - padded["tokens"] / padded["padded_tokens"]).map("{:.1%}".format)
    peaks = pd.DataFrame({recipe: measured["flops"].unstack()[precision_of(recipe)] for recipe in recipes})
    # Chowdhery et al. 2022, appendix B, without the attention term: 6 FLOPs per parameter and token.
    mfu = 6.0 * parameters * tokens / peaks
    table["MFU"] = mfu.median().map("{:.1%}".format)
    page.table("speed", table.rename_axis("recipe"))
    ratios = {own: rates.rdiv(rates[own], axis=0) for own in recipes if own.removesuffix(BF16) in OWN}
    if ratios and len(recipes) > 1:
        cells = {
            f"{own} is × as fast": [
                f"{middle:.2f} ({low:.2f} to {high:.2f})"
                for middle, low, high in zip(of.median(), of.min(), of.max(), strict=True)
            ]
            for own, of in ratios.items()
        }
        page.table("compared with", pd.DataFrame(cells, index=pd.Index(recipes, name="compared with")))
    page.chart("examples per second", rates.median().to_frame("median of the rounds"), "examples per second")
    page.numbers["mfu"] = mfu.to_dict("list")
    page.numbers["examples_per_second"] = rates.to_dict("list")
    page.numbers["rounds"] = {str(key): row.dropna().to_dict() for key, row in measured.iterrows()}


if __name__ == "__main__":
    sys.exit(run_program(main))
