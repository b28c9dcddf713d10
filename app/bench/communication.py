"""Communication laboratory: show, time and explain what the ranks of a training job exchange.

    torchrun --standalone --nproc_per_node=2 -m app.bench.communication

Writes communication.html, communication.json and communication.txt into `--output_dir` (default: a new folder in
runs/communication/). docs/communication.md explains how to read them.
"""

from __future__ import annotations

import argparse
import os
import socket
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist

from app.bench.collectives_section import measure_collectives
from app.bench.page import Section, as_html, as_text
from app.cli import SettingsParser, launch
from app.distributed.collectives import all_gather_object, raise_on_all_ranks
from app.distributed.process_group import join
from app.distributed.world import World
from app.errors import escape_control_characters
from app.files import write_json, write_text
from app.hardware import device_name, git_commit
from app.runs.folder import create_folder
from app.runs.schema import RUNS
from app.settings import Settings

SECTIONS = ("collectives",)
TITLE = "Communication laboratory"
SMALLEST_LIMIT = 1 / 64  # MiB: a fit needs three sizes, 1, 4 and 16 KiB


def add_arguments(parser: SettingsParser) -> None:
    """Add the flags of this program."""
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, metavar="NAME", help=f"which of {', '.join(SECTIONS)}; default: all"
    )
    parser.add_argument(
        "--largest_mib", type=size_in_mib, default=256.0, metavar="X", help="largest tensor to time, in MiB"
    )
    parser.add_argument(
        "--seconds_per_point", type=positive, default=1.0, metavar="X", help="time to spend on each collective and size"
    )


def size_in_mib(text: str) -> float:
    """Parse `--largest_mib`."""
    value = positive(text)
    if not SMALLEST_LIMIT <= value <= 2**20:
        raise argparse.ArgumentTypeError(f"{text}: must be from {SMALLEST_LIMIT:g} (16 KiB) to {2**20:,}")
    return value


def positive(text: str) -> float:
    """Parse a positive number."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be a positive number")
    return value


def main(settings: Settings, sections: list[str] | None, largest_mib: float, seconds_per_point: float) -> None:
    with join(settings) as world:
        folder = None
        with raise_on_all_ranks(world):
            if world.is_main_process:
                folder = create_folder(settings.output_dir, RUNS / "communication")
        facts = describe_machine(world)
        world.print_main(f"{TITLE}: {', '.join(f'{name} {value}' for name, value in facts.items())}\n")
        measured = []
        for name in SECTIONS:
            if sections is None or name in sections:
                section = measure(name, settings, world, largest_mib, seconds_per_point)
                world.print_main(as_text(section))
                measured.append(section)
        with raise_on_all_ranks(world):
            if folder is not None:
                content: dict[str, Any] = {"machine": facts, "sections": {one.name: one.data for one in measured}}
                write_json(folder / "communication.json", content)
                write_text(folder / "communication.txt", "\n".join(map(as_text, measured)))
                write_text(folder / "communication.html", as_html(TITLE, facts, measured))
                print(escape_control_characters(f"written to {folder}/: communication.html, .json, .txt"))


def measure(name: str, settings: Settings, world: World, largest_mib: float, seconds_per_point: float) -> Section:
    """Measure one section. Collective."""
    if name == "collectives":
        return measure_collectives(settings, world, int(largest_mib * 2**20), seconds_per_point)
    raise AssertionError(name)


def describe_machine(world: World) -> dict[str, str]:
    """Return facts about the machine that every figure depends on, by name. Collective."""
    nodes = len(set(all_gather_object(socket.gethostname(), world)))
    commit = git_commit() or "unknown"
    return {
        "ranks": f"{world.size} on {nodes} node(s)",
        "backend": dist.get_backend(),
        "device": f"{device_name(world.device)}, {os.cpu_count()} CPU cores",
        "threads": f"{torch.get_num_threads()} per rank",
        "PyTorch": torch.__version__,
        "commit": commit[:12] + commit[40:],  # with the mark of uncommitted changes
        "date": f"{datetime.now():%Y-%m-%d %H:%M}",
    }


if __name__ == "__main__":
    launch(main, __doc__, add_arguments)
