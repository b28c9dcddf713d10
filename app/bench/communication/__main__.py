"""Communication laboratory: show, time and explain what the ranks of a training job exchange.

    torchrun --standalone --nproc_per_node=2 -m app.bench.communication
    python -m app.bench.communication --sections ladder --link 1:1

Writes communication.html, communication.json and communication.md into `--output_dir` (default: a new folder in
runs/communication/). docs/communication.md explains how to read them.
"""

from __future__ import annotations

import inspect
import os
import sys
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial

from ...cli import parse_flags, program_name
from ...common.errors import UserError, escape_control_characters
from ...common.link import Link
from ...distributed.collectives import raise_on_all_ranks
from ...distributed.environment import default_threads, started_by_torchrun
from ...distributed.process_group import join
from ...flags import (
    BENCHMARKS,
    COLLECTIVE_SECTIONS,
    DEFAULT_SECTIONS,
    SECTIONS,
    STEP_SECTIONS,
    add_communication_flags,
    reject_unused,
)
from ...program import launch, run_program
from ...runs.folder import create_folder
from ...runs.schema import RUNS
from ...setting_groups import TINY_BERT
from ...settings import Settings
from ...training.build import build_data, build_model
from ...training.console import quiet_libraries
from ..core import Lab, Page, describe_job
from ..jobs import LINK_VARIABLE, run_job
from ..ladder import ladder
from ..page import show
from .sections import Options, check, measure

TITLE = "Communication laboratory"
PORTED = {"ladder": ladder}
TRAININGS = {"compression", "convergence"}  # sections that train for a number of steps, and evaluate


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
        with raise_on_all_ranks(world):
            check_link(link)
        default = STEP_SECTIONS if link else DEFAULT_SECTIONS
        names = [name for name in SECTIONS if name in (sections or default)]
        trains_none = set(names) <= set(COLLECTIVE_SECTIONS)
        folder = None
        quiet_libraries(world)
        with raise_on_all_ranks(world):
            used = {field.name for field in fields(settings)}
            if not TRAININGS & set(names):
                used -= {"max_steps", "num_train_epochs", "eval_batch_size"}
            if trains_none:
                used = {"use_cpu", "threads", "ddp_timeout", "output_dir", "disable_tqdm"}
            reject_unused(settings, used, f"on --sections {' '.join(names)}", model=TINY_BERT)
        options = Options(int(largest_mib * 2**20), seconds_per_point, seeds, over_link=link is not None)
        data = None if trains_none else build_data(settings, world)
        with raise_on_all_ranks(world):
            check(names, settings, options, n_train=len(data.split.train) if data else 0, world=world)
        if data is not None:  # a model that cannot be loaded would be noticed only after minutes
            options = replace(options, pretrained=build_model(settings, data, world).pretrained)
        with raise_on_all_ranks(world):
            if world.is_main_process:
                folder = create_folder(settings.output_dir, RUNS / "communication")
        facts = describe_job(world)
        if link:
            facts["link"] = os.environ[LINK_VARIABLE]
        page = Page(TITLE, facts, folder, settings.as_dict())
        lab = Lab(
            page=page,
            settings=settings,
            world=world,
            data=data,
            seconds=seconds_per_point,
            largest=options.largest,
            seeds=seeds,
            over_link=options.over_link,
        )
        for name in names:
            if section := PORTED.get(name):
                page.section(name, *(inspect.getdoc(section) or "").split("\n\n"))
                section(lab)
            else:
                show(measure(name, settings, data, options=options, world=world), page)
            with raise_on_all_ranks(world):
                page.write("communication")
        world.print_main(escape_control_characters(f"written to {folder}/: communication.html, .json, .md"))


def check_link(link: Link | None) -> None:
    """Raise `UserError` if the ranks are not those that `--link` starts."""
    if link and LINK_VARIABLE not in os.environ:
        raise UserError(f"--link: starts its own two ranks: use python -m {program_name()}, without torchrun")


def start() -> int:
    """Start the ranks on two nodes if `--link` is given; otherwise this process is a rank."""
    rejected = BENCHMARKS["bench.communication"]
    if not started_by_torchrun():
        with suppress(UserError):  # the rank reports it
            settings, flags = parse_flags(__doc__, sys.argv[1:], add_communication_flags, rejected=rejected)
            if flags["link"]:
                threads = settings.threads or default_threads(2)
                command = [*sys.argv[1:], "--use_cpu", f"--threads={threads}"]
                return run_program(partial(run_job, "bench.communication", command, ranks=2, link=flags["link"]))
    launch(main, __doc__, add_communication_flags, rejected=rejected)


if __name__ == "__main__":
    sys.exit(start())
