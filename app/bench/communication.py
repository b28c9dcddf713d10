"""Communication laboratory: show, time and explain what the ranks of a training job exchange.

    torchrun --standalone --nproc_per_node=2 -m app.bench.communication
    python -m app.bench.communication --sections ladder --link 1:1

Writes communication.html, communication.json and communication.md into `--output_dir` (default: a new folder in
runs/communication/). docs/communication.md explains how to read them.
"""

from __future__ import annotations

if __name__ == "__main__":
    from ..program import check_command_line
    from .flags import add_communication_flags

    check_command_line(__doc__, add_communication_flags)

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ..cli import parse_flags, program_name
from ..common.errors import UserError, escape_control_characters
from ..common.formats import MIB
from ..common.link import Link
from ..distributed.collectives import raise_on_all_ranks
from ..distributed.environment import default_threads, started_by_torchrun
from ..distributed.process_group import join
from ..program import launch, run_program
from ..runs.folder import create_folder
from ..runs.schema import RUNS
from ..settings import Settings
from ..training.build import build_data
from ..training.console import quiet_libraries
from .collectives import collectives, granularity, operations, point_to_point
from .core import Lab, Page, describe_job
from .flags import COLLECTIVE_SECTIONS, DEFAULT_SECTIONS, SECTIONS, STEP_SECTIONS, add_communication_flags
from .jobs import LINK_VARIABLE, run_job
from .ladder import ladder
from .sections import batch_size, breakdown, buckets, no_sync, readiness, reduction, unused_parameters
from .trainings import compression, convergence

ALL = (
    *(collectives, breakdown, buckets, no_sync, unused_parameters, reduction, compression, ladder, convergence),
    *(readiness, batch_size, granularity, point_to_point, operations),
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
        names = [name for name in SECTIONS if name in (sections or (STEP_SECTIONS if link else DEFAULT_SECTIONS))]
        quiet_libraries(world)
        with raise_on_all_ranks(world):
            if link and LINK_VARIABLE not in os.environ:
                raise UserError(f"--link: starts its own two ranks: use python -m {program_name()}, without torchrun")
        data = None if set(names) <= set(COLLECTIVE_SECTIONS) else build_data(settings, world)
        folder = None
        with raise_on_all_ranks(world):
            if world.is_main_process:
                folder = create_folder(settings.output_dir, RUNS / "communication")
        facts = describe_job(world)
        if link:
            facts["link"] = os.environ[LINK_VARIABLE]
        lab = Lab(
            page=Page("Communication laboratory", facts, folder, settings.as_dict()),
            settings=settings,
            world=world,
            data=data,
            seconds=seconds_per_point,
            largest=int(largest_mib * MIB),
            seeds=seeds,
            over_link=link is not None,
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
            settings, flags = parse_flags(__doc__, sys.argv[1:], add_communication_flags)
            if flags["link"]:
                threads = settings.threads or default_threads(2)
                command = [*sys.argv[1:], "--use_cpu", f"--threads={threads}"]
                return run_program(partial(run_job, "bench.communication", command, ranks=2, link=flags["link"]))
    launch(main, __doc__, add_communication_flags)


if __name__ == "__main__":
    sys.exit(start())
