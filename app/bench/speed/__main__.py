"""Benchmark: the training paths compared with other ways to train the same model, in alternating rounds.

    torchrun --standalone --nproc_per_node=2 -m app.bench.speed --csv reviews.csv --threads 1
    torchrun --standalone --nproc_per_node=2 -m app.bench.speed --models tiny-bert 4x312 12x768
    python -m app.bench.speed --recipes ddp_loop-bf16

Prints examples per second, real tokens per second, padding and MFU, and writes speed.html and speed.json into
`--output_dir` (default: a new folder in runs/speed/). With a single recipe, it reports the recipe's peak memory instead
of MFU. docs/speed.md describes the recipes and how they are measured.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from ...common.errors import UserError, escape_control_characters
from ...common.files import write_json, write_text
from ...common.formats import format_size
from ...distributed.collectives import raise_on_all_ranks
from ...distributed.process_group import join
from ...distributed.world import World
from ...flags import BENCHMARKS, RECIPES, SHORT_NAMES, add_speed_flags, reject_unused
from ...plan.empty_model import count_activations
from ...program import launch
from ...runs.folder import create_folder
from ...runs.schema import RUNS
from ...setting_groups import TINY_BERT
from ...settings import Settings
from ...training.build import build_data, build_model, read_and_split
from ...training.console import quiet_libraries
from ..core import describe_job
from ..page import Section, as_html, as_markdown
from .measure import OWN, measure
from .models import with_model
from .recipe import Task, precision_of
from .report import section

TITLE = "Speed"
# The settings that the recipes of others have as well. `max_length`: they truncate as the training paths do.
OF_THE_TASK = (
    *("csv", "text_column", "label_column", "test_size", "validation_size", "max_length", "cache_dir"),
    *("model", "revision", "trust_remote_code", "dropout", "seed", "train_batch_size", "per_device_train_batch_size"),
    *("use_cpu", "threads", "ddp_timeout", "deterministic", "output_dir", "disable_tqdm"),
)
BYTES_PER_PARAMETER = 20  # fp32: the parameter, its gradient, DDP's copy of the gradient, and two moments


def main(settings: Settings, *, models: list[str] | None, recipes: list[str] | None, steps: int, rounds: int) -> None:
    with join(settings) as world:
        quiet_libraries(world)
        names = [name for name in RECIPES if recipes is None or name in recipes]
        open_with = partial(open_task, settings=settings, steps=steps, rounds=rounds, world=world)
        folder = None
        with raise_on_all_ranks(world):
            check(settings, models, names)
        all_models = list(dict.fromkeys(models or [settings.model]))
        for model in all_models:  # a mistake in the last one would be noticed only after minutes
            with open_with(model) as (task, of_model, _), raise_on_all_ranks(world):
                check_memory(needed_memory(task, of_model, names), len(names), world)
        with raise_on_all_ranks(world):
            if world.is_main_process:
                folder = create_folder(settings.output_dir, RUNS / "speed")
        facts = describe_job(world) | {"rounds": f"{rounds} of {steps} steps"}
        world.print_main(
            escape_control_characters(f"# {TITLE}: {', '.join(f'{key} {value}' for key, value in facts.items())}")
            + "\n"
        )
        measured: list[Section] = []
        for model in all_models:
            with open_with(model) as (task, of_model, temporary):
                results = measure(names, task, of_model, folder=temporary, world=world)
            title = f"{SHORT_NAMES.get(model, model)}, {world.size} rank{'s' if world.size > 1 else ''}"
            measured.append(section(model, title, results, on_cpu=world.device.type == "cpu"))
            world.print_main(as_markdown(measured[-1]))
            with raise_on_all_ranks(world):  # after each model, so that a later failure does not lose it
                if folder is not None:
                    content = {"machine": facts, "settings": settings.as_dict()}
                    content["models"] = {one.name: one.data for one in measured}
                    write_json(folder / "speed.json", content)
                    write_text(folder / "speed.html", as_html(TITLE, facts, measured, json_name="speed.json"))
        world.print_main(escape_control_characters(f"written to {folder}/: speed.html, speed.json"))


def check(settings: Settings, models: list[str] | None, recipes: Sequence[str]) -> None:
    """Raise `UserError` if a setting has no effect on the selected models and recipes."""
    if models and settings.model != TINY_BERT:
        raise UserError("--models and --model exclude each other: give only one of them")
    if not set(recipes) & set(OWN):
        reject_unused(settings, OF_THE_TASK, "on these --recipes: only those of this project have it")


def needed_memory(task: Task, settings: Settings, recipes: Sequence[str]) -> int:
    """Return the bytes that a recipe keeps on each rank: the training state, and the activations of the longest batch.

    Each recipe trains in a thread of its own, and the allocator keeps what it has freed for the same thread.
    """
    precision: Any = "fp32" if "fp32" in map(precision_of, recipes) else "bf16"
    try:
        config = copy.deepcopy(task.model.config)
        activations = count_activations(
            replace(settings, precision=precision), config, rows=task.batch_size, device=torch.device("cpu")
        ).peak
    except UserError:  # the computation of the model depends on data
        activations = 0
    return BYTES_PER_PARAMETER * task.model.num_parameters() + activations


def check_memory(needed_by_recipe: int, recipes: int, world: World) -> None:
    """Raise `UserError` if this node's main memory cannot hold all recipes at once."""
    if world.device.type != "cpu":
        return  # an allocation that fails there is one line, and ends no other process
    needed = needed_by_recipe * recipes * world.local_size
    available = psutil.virtual_memory().available
    if needed > available:
        raise UserError(
            f"{recipes} recipes need {format_size(needed)} on this node, and {format_size(available)} are available: "
            "compare fewer at a time, with --recipes, or give a smaller --train_batch_size"
        )


class OpenTask(NamedTuple):
    task: Task
    settings: Settings  # with the model
    folder: Path


@contextmanager
def open_task(model: str, settings: Settings, *, steps: int, rounds: int, world: World) -> Iterator[OpenTask]:
    """Build what the recipes have in common, and a temporary folder for the files of their runs. Collective."""
    with tempfile.TemporaryDirectory() as temporary:  # each rank has its own
        folder = Path(temporary)
        settings = replace(settings, disable_tqdm=True)
        with raise_on_all_ranks(world):
            table, split, _ = read_and_split(settings, world.size)
            settings = with_model(settings, model, table.sample_texts(split.train), folder=folder / "model")
        data = build_data(settings, world)
        yield OpenTask(
            Task(data, build_model(settings, data, world, trim=False).model, steps, rounds + 1), settings, folder
        )


if __name__ == "__main__":
    launch(main, __doc__, add_speed_flags, rejected=BENCHMARKS["bench.speed"])
