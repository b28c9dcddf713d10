"""Communication laboratory: what the exchanges of a training step cost, and what settings of DDP change.

    torchrun --standalone --nproc_per_node=2 -m app.bench.communication
    python -m app.bench.communication --sections ladder --link 1:1

Each section times the training step of app.ddp_loop, in variants that train on the same batches from the same weights,
in 3 to 7 rounds. Every second round has the opposite order, so a moment in which the machine is slow affects all
variants. A round takes as long as the slowest rank. A table shows the median time, and as `relative` the median of the
rounds' ratios to the first variant, with the lowest and the highest: if 1 is between them, the rounds show no
difference. Except in `breakdown`, the strategy is ddp, and gradients are not compressed. Two ranks on one machine
exchange gradients through its memory, which is faster than a network; with `--link`, through a link between two nodes.

Writes communication.md and communication.json, which has the times of all rounds, into `--output_dir` (default: a new
folder in runs/communication/).
"""

from __future__ import annotations

from ..cli import OneLineParser, count, positive, program_name
from ..program import Program, run_program
from ..settings import OF_A_STEP, OF_AN_UPDATE, Settings
from .models import measure_tiny_bert
from .two_nodes import Link, link

DEFAULT = ("breakdown", "no_sync", "unused_parameters", "reduction")
SECTIONS = (*DEFAULT, "compression", "ladder", "convergence", "readiness")


def add_arguments(parser: OneLineParser) -> None:
    measure_tiny_bert(parser)
    add = parser.add_argument
    about = f"which of {', '.join(SECTIONS)}; default: the first {len(DEFAULT)}"
    add("--sections", nargs="+", choices=SECTIONS, metavar="NAME", help=about)
    about = "start two ranks on two nodes on this machine, with a link between them, in Gbit/s and milliseconds"
    add("--link", type=link, metavar="RATE:DELAY", help=f"{about}, such as 1:1 (Linux, root); without torchrun")
    about = "each variant of a training step is timed for about 5 times as long"
    add("--seconds_per_point", type=positive, default=1.0, metavar="X", help=about)
    add("--seeds", type=count, default=3, metavar="N", help="training runs of each variant (convergence)")


PROGRAM = Program(__doc__, add_arguments, only=OF_A_STEP | OF_AN_UPDATE | {"max_steps", "output_dir"})
if __name__ == "__main__":
    PROGRAM.check_command_line()  # before torch is imported, which takes seconds

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ..common.errors import UserError, escape_control_characters
from ..distributed.collectives import local_main_process_first, raise_on_all_ranks
from ..distributed.environment import default_threads, started_by_torchrun
from ..distributed.process_group import join
from ..runs.folder import create_folder
from ..runs.schema import RUNS
from ..training.build import build_data
from ..training.console import quiet_libraries
from .core import Lab, Page, describe_job
from .jobs import LINK_VARIABLE, run_job
from .ladder import ladder
from .models import with_model_folder
from .sections import breakdown, compression, convergence, no_sync, readiness, reduction, unused_parameters

ALL = (breakdown, no_sync, unused_parameters, reduction, compression, ladder, convergence, readiness)
MEASURE: dict[str, Callable[[Lab], None]] = {section.__name__: section for section in ALL}


def main(
    settings: Settings, *, sections: list[str] | None, link: Link | None, seconds_per_point: float, seeds: int
) -> None:
    with join(settings) as world:
        names = [name for name in SECTIONS if name in (sections or DEFAULT)]
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
        facts = describe_job(world) | {"model": settings.model} | ({"link": str(link)} if link else {})
        page = Page("Communication laboratory", facts, folder, settings.as_dict())
        lab = Lab(page=page, settings=settings, world=world, data=data, seconds=seconds_per_point, seeds=seeds)
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
        world.print_main(escape_control_characters(f"written to {folder}/: communication.md, communication.json"))


def start() -> int:
    """Start the ranks on two nodes if `--link` is given; otherwise this process is a rank."""
    if not started_by_torchrun():
        with suppress(UserError):  # the rank reports it
            settings, flags = PROGRAM.parse(sys.argv[1:])
            if flags["link"]:
                threads = settings.threads or default_threads(2)
                command = [*sys.argv[1:], "--use_cpu", f"--threads={threads}"]
                return run_program(partial(run_job, "bench.communication", command, ranks=2, link=flags["link"]))
    PROGRAM.launch(main)


if __name__ == "__main__":
    sys.exit(start())
