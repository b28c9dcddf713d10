"""Communication laboratory: show, time and explain what the ranks of a training job exchange.

    torchrun --standalone --nproc_per_node=2 -m app.bench.communication

Writes communication.html, communication.json and communication.md into `--output_dir` (default: a new folder in
runs/communication/). docs/communication.md explains how to read them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...cli import OneLineParser, count, positive
from ...common.errors import UserError, escape_control_characters, shorten
from ...common.files import write_json, write_text
from ...distributed.collectives import raise_on_all_ranks
from ...distributed.process_group import join
from ...distributed.world import World
from ...program import launch
from ...runs.folder import create_folder
from ...runs.schema import RUNS
from ...settings import Settings
from ...training.build import build_data, build_model
from ...training.console import quiet_libraries
from ..harness import describe_job
from ..page import Section, as_html, as_markdown
from . import training_step
from .collectives_section import check_largest, measure_collectives
from .compression import measure_compression, settings_by_hook

SECTIONS = ("collectives", *training_step.SECTIONS, "compression")
TITLE = "Communication laboratory"
STEP_SECONDS = 5  # for a variant of a training step, of which there are few, in multiples of --seconds_per_point
ABOUT_SECONDS = (
    "about how long to time each collective with each size; each variant of a training step takes "
    f"{STEP_SECONDS} times as long"
)
SMALLEST_LIMIT = 1 / 64  # MiB: a fit needs three sizes, 1, 4 and 16 KiB


def add_arguments(parser: OneLineParser) -> None:
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, metavar="NAME", help=f"which of {', '.join(SECTIONS)}; default: all"
    )
    parser.add_argument(
        "--largest_mib", type=size_in_mib, default=256.0, metavar="X", help="largest tensor to time, in MiB"
    )
    parser.add_argument("--seconds_per_point", type=positive, default=1.0, metavar="X", help=ABOUT_SECONDS)
    parser.add_argument(
        "--seeds", type=count, default=3, metavar="N", help="trainings with each kind of compressed gradients"
    )


def size_in_mib(text: str) -> float:
    value = positive(text)
    if not SMALLEST_LIMIT <= value <= 2**20:
        raise argparse.ArgumentTypeError(f"{shorten(text)}: must be from {SMALLEST_LIMIT:g} (16 KiB) to {2**20:,}")
    return value


def main(
    settings: Settings, *, sections: list[str] | None, largest_mib: float, seconds_per_point: float, seeds: int
) -> None:
    with join(settings) as world:
        names = [name for name in SECTIONS if sections is None or name in sections]
        largest = int(largest_mib * 2**20)
        folder = None
        quiet_libraries(world)
        with raise_on_all_ranks(world):
            if "collectives" in names:
                check_largest(largest, world.size)
        data = None
        if names != ["collectives"]:
            data = build_data(settings, world)
            with raise_on_all_ranks(world):
                check(names, settings, seeds, n_train=len(data.split.train), world=world)
            build_model(settings, data, world)  # a model that cannot be loaded would be noticed only after minutes
        with raise_on_all_ranks(world):
            if world.is_main_process:
                folder = create_folder(settings.output_dir, RUNS / "communication")
        facts = describe_job(world)
        world.print_main(headline(facts))
        measured = []
        for name in names:
            seconds = STEP_SECONDS * seconds_per_point
            if data is None or name == "collectives":
                section = measure_collectives(
                    world, largest, seconds_per_point=seconds_per_point, disable_tqdm=settings.disable_tqdm
                )
            elif name == "compression":
                section = measure_compression(settings, data, seeds, seconds=seconds, world=world)
            else:
                section = training_step.measure_step(name, settings, data, seconds=seconds, world=world)
            world.print_main(as_markdown(section))
            measured.append(section)
            with raise_on_all_ranks(world):  # after each section, so that a later failure does not lose it
                if folder is not None:
                    write(folder, facts, settings, measured=measured)
        world.print_main(escape_control_characters(f"written to {folder}/: communication.html, .json, .md"))


def check(names: Sequence[str], settings: Settings, seeds: int, *, n_train: int, world: World) -> None:
    """Check, before anything is measured, that every section can be.

    Raises:
        UserError: a setting or a flag that a section cannot be measured with.
    """
    for name in names:
        try:
            if name == "compression":
                settings_by_hook(settings, seeds, n_train=n_train, ranks=world.size)
            elif name != "collectives":
                training_step.variants_of(name, settings, n_train, topology=world.topology)
        except UserError as problem:
            raise UserError(f"section {name}: {problem} (--sections names those to measure)") from None


def write(folder: Path, facts: Mapping[str, str], settings: Settings, *, measured: Sequence[Section]) -> None:
    """Write, or replace, the three files."""
    content: dict[str, Any] = {
        "machine": facts,
        "settings": settings.as_dict(),
        "sections": {section.name: section.data for section in measured},
    }
    write_json(folder / "communication.json", content)
    write_text(folder / "communication.md", "\n".join([headline(facts), *map(as_markdown, measured)]))
    write_text(folder / "communication.html", as_html(TITLE, facts, measured))


def headline(facts: Mapping[str, str]) -> str:
    return (
        escape_control_characters(f"# {TITLE}: {', '.join(f'{name} {value}' for name, value in facts.items())}") + "\n"
    )


if __name__ == "__main__":
    launch(main, __doc__, add_arguments)
