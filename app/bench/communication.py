"""Communication laboratory: show, time and explain what the ranks of a training job exchange.

    torchrun --standalone --nproc_per_node=2 -m app.bench.communication
    python -m app.bench.communication --sections ladder --link 1:1

Writes communication.html, communication.json and communication.md into `--output_dir` (default: a new folder in
runs/communication/). docs/communication.md explains how to read them.
"""

from __future__ import annotations

import argparse

from ..cli import OneLineParser, count, positive
from ..common.errors import shorten
from ..program import check_command_line, launch, run_program
from .models import measure_tiny_bert
from .two_nodes import Link, link

# The sections on training steps, which --link measures by default, and what is measured only with --sections.
STEPS = ("breakdown", "no_sync", "unused_parameters", "reduction")
ON_REQUEST = ("compression", "ladder", "convergence", "readiness")
SECTIONS = ("collectives", *STEPS, *ON_REQUEST)
SMALLEST_LIMIT = 1 / 64  # MiB: the three sizes 1, 4 and 16 KiB


def add_arguments(parser: OneLineParser) -> None:
    measure_tiny_bert(parser)
    add = parser.add_argument
    about = f"which of {', '.join(SECTIONS)}; default: the first {len(STEPS) + 1}, and with --link {', '.join(STEPS)}"
    add("--sections", nargs="+", choices=SECTIONS, metavar="NAME", help=about)
    about = "start two ranks on two nodes on this machine, with a link of so many Gbit/s and milliseconds between them"
    add("--link", type=link, metavar="RATE:DELAY", help=f"{about}, such as 1:1 (Linux, root); without torchrun")
    add("--largest_mib", type=size_in_mib, default=256.0, metavar="X", help="largest tensor to time, in MiB")
    about = "about how long to time each collective with each size; variants of a training step take 5 times as long"
    add("--seconds_per_point", type=positive, default=1.0, metavar="X", help=about)
    add("--seeds", type=count, default=3, metavar="N", help="training runs of each variant (convergence)")


def size_in_mib(text: str) -> float:
    value = positive(text)
    if not SMALLEST_LIMIT <= value <= 2**20:
        raise argparse.ArgumentTypeError(f"{shorten(text)}: must be from {SMALLEST_LIMIT:g} (16 KiB) to {2**20:,}")
    return value


if __name__ == "__main__":
    check_command_line(__doc__, add_arguments)  # before torch is imported, which takes seconds

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ..cli import parse_flags, program_name
from ..common.errors import UserError, escape_control_characters
from ..common.formats import MIB
from ..distributed.collectives import local_main_process_first, raise_on_all_ranks
from ..distributed.environment import default_threads, started_by_torchrun
from ..distributed.process_group import join
from ..runs.folder import create_folder
from ..runs.schema import RUNS
from ..settings import Settings
from ..training.build import build_data
from ..training.console import quiet_libraries
from .collectives import collectives
from .convergence import convergence
from .core import Lab, Page, describe_job
from .jobs import LINK_VARIABLE, run_job
from .ladder import ladder
from .models import with_model_folder
from .sections import breakdown, compression, no_sync, readiness, reduction, unused_parameters

ALL = (
    *(collectives, breakdown, no_sync, unused_parameters, reduction),
    *(compression, ladder, convergence, readiness),
)
MEASURE: dict[str, Callable[[Lab], None]] = {section.__name__: section for section in ALL}


def main(
    settings: Settings,
    *,
    sections: list[str] | None,
    link: Link | None,
    largest_mib: float,
    seconds_per_point: float,
    seeds: int,
) -> None:
    with join(settings) as world:
        names = [name for name in SECTIONS if name in (sections or (STEPS if link else SECTIONS[: len(STEPS) + 1]))]
        quiet_libraries(world)
        with raise_on_all_ranks(world):
            if link and LINK_VARIABLE not in os.environ:
                raise UserError(f"--link: starts its own two ranks: use python -m {program_name()}, without torchrun")
        with local_main_process_first(world):
            settings = with_model_folder(settings)
        data = build_data(settings, world)
        folder = None
        with raise_on_all_ranks(world):
            if world.is_main_process:
                folder = create_folder(settings.output_dir, RUNS / "communication")
        facts = describe_job(world)
        if link:
            facts["link"] = os.environ[LINK_VARIABLE]
        page = Page("Communication laboratory", facts | {"model": settings.model}, folder, settings.as_dict())
        largest = int(largest_mib * MIB)
        lab = Lab(
            page=page,
            settings=settings,
            world=world,
            data=data,
            seconds=seconds_per_point,
            largest=largest,
            seeds=seeds,
        )
        try:
            for name in names:
                title, _, about = (MEASURE[name].__doc__ or name).partition("\n")
                lab.page.section(name, title, about)
                MEASURE[name](lab)
                with raise_on_all_ranks(world):
                    lab.page.write("communication")
        except UserError:
            with suppress(OSError):  # nothing is left of a mistake, unless a section has been measured
                if folder:
                    folder.rmdir()
            raise
        world.print_main(escape_control_characters(f"written to {folder}/: communication.html, .json, .md"))


def start() -> int:
    """Start the ranks on two nodes if `--link` is given; otherwise this process is a rank."""
    if not started_by_torchrun():
        with suppress(UserError):  # the rank reports it
            settings, flags = parse_flags(__doc__, sys.argv[1:], add_arguments)
            if flags["link"]:
                threads = settings.threads or default_threads(2)
                command = [*sys.argv[1:], "--use_cpu", f"--threads={threads}"]
                return run_program(partial(run_job, "bench.communication", command, ranks=2, link=flags["link"]))
    launch(main, __doc__, add_arguments)


if __name__ == "__main__":
    sys.exit(start())
