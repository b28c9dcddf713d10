"""Strong and weak scaling: measured on this machine, predicted from two ranks, and extrapolated to a cluster.

    python -m app.bench.scaling
    python -m app.bench.scaling --ranks 1 2 --links 1:5 --rounds 3
    python -m app.bench.scaling --ranks 1 2 4 --links --strategies ddp zero1 zero2 zero3
    python -m app.bench.scaling --links --link_gbit 100 --link_latency_us 10
    python -m app.bench.scaling --step_ms 250 --parameters 60e6 --link_gbit 100 --straggler_percent 3
    python -m app.bench.scaling --profile runs/ddp_loop/latest --parameters 60e6

Starts torchrun jobs with 1, 2, 4 and 8 ranks on this machine's GPUs. Without GPUs, they share the CPU, and one more job
has two network namespaces with a shaped link between them (needs root; left out otherwise). With `--step_ms` or
`--profile` it starts none, and only predicts a cluster, such as of GPUs: from the time of a step without exchanges, or
from the folder of a run with `--profile N`. Writes scaling.html and scaling.json into `--output_dir`. docs/scaling.md
explains the measurements, the model that predicts them and clusters of up to 1,024 ranks, and the page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch

from ...cli import OneLineParser, command_line
from ...common.errors import UserError, escape_control_characters
from ...common.files import write_json, write_text
from ...common.formats import mib
from ...common.machine import describe_machine
from ...distributed.processes import count_gpus
from ...flags import link
from ...plan.step import Plan
from ...program import run_program
from ...runs.folder import create_folder
from ...runs.schema import RUNS
from ..page import Section, as_html, as_markdown
from .cluster_section import ClusterFlags, cluster_section
from .configuration import FIT_RANKS, LINK, NODE, Hop, ScalingPlan
from .flags import DEFAULT_LINKS, add_scaling_flags
from .measure import measure, open_jobs
from .models import check_length, model_config
from .predict import fit
from .report import describe, raw_data, sections
from .step_profile import StepProfile, from_step_time, profile_input, read_profile
from .strategies import plan_strategies
from .task_job import check_temporary_folder

TITLE = "Scaling"
DEFAULT_RANKS = (1, 2, 4, 8)
MOST_RANKS = 64  # on one machine
MOST_PARAMETERS = 1e12
MEASUREMENT_FLAGS = (
    *("model", "ranks", "links", "train_batch_size", "length"),
    *("threads", "steps", "rounds", "strategies", "use_cpu"),
)


def main() -> int:
    arguments = parse()
    profile = step_profile(arguments)
    cluster = cluster_flags(arguments, profile)
    if profile is None:
        predict_from_measurements(arguments, cluster)
        return 0
    source = profile_input(profile, round(arguments.parameters), cluster)
    facts = {**describe_machine(torch.device("cpu")), "command": command_line()}
    section = cluster_section(source, cluster)
    data = {"computation": asdict(source.computation), "sections": {section.name: section.data}}
    write_report(create_folder(arguments.output_dir, RUNS / "scaling"), facts, [section], data=data)
    return 0


def predict_from_measurements(arguments: argparse.Namespace, cluster: ClusterFlags) -> None:
    gpus = count_gpus(arguments.use_cpu)
    ranks = arguments.ranks or [n for n in DEFAULT_RANKS if n <= (gpus or n)]
    links = arguments.links if arguments.links is not None else [] if gpus else [link(text) for text in DEFAULT_LINKS]
    plan = ScalingPlan(
        model=arguments.model,
        ranks=sorted(set(ranks)),
        links=list(dict.fromkeys(links)),
        batch=arguments.train_batch_size,
        rows=arguments.rows,
        length=arguments.length,
        steps=arguments.steps,
        rounds=arguments.rounds,
        threads=arguments.threads,
        strategies=tuple(dict.fromkeys(("ddp", *arguments.strategies))),
        gpus=gpus,
    )
    check(plan)
    config = model_config(plan.model, use_cpu=not plan.gpus)
    check_length(config, plan.length)
    model = None
    if len(plan.strategies) > 1:
        model = plan_strategies(config, plan.length, use_cpu=not plan.gpus)
        check_memory(plan, model)
    folder = create_folder(arguments.output_dir, RUNS / "scaling")
    with open_jobs(plan, folder) as jobs:
        rounds = measure(plan, jobs)
        method = jobs.nodes[1].method if jobs.nodes else None
    fits = fit(rounds, plan.n_cores, plan.threads)
    report = sections(plan, rounds, fits, flags=cluster, model=model)
    write_report(folder, describe(plan, method), report, data=raw_data(plan, rounds, fits, report=report))


def write_report(folder: Path, facts: dict[str, str], report: Sequence[Section], *, data: Mapping[str, Any]) -> None:
    """Print the tables, and write the page and the numbers."""
    for section in report:
        print(f"\n{as_markdown(section)}")
    write_json(folder / "scaling.json", {"machine": facts, **data})
    write_text(folder / "scaling.html", as_html(TITLE, facts, report, json_name="scaling.json"))
    print(escape_control_characters(f"written to {folder}/: scaling.html, scaling.json"))


def parse() -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    add_scaling_flags(parser)
    arguments = parser.parse_args()
    source = next((name for name in ("step_ms", "profile") if getattr(arguments, name) is not None), None)
    for name in MEASUREMENT_FLAGS if source else ():
        if getattr(arguments, name) != parser.get_default(name):
            raise UserError(f"--{name}: with --{source}, nothing is measured")
    return arguments


def step_profile(arguments: argparse.Namespace) -> StepProfile | None:
    """Return the step that `--step_ms` or `--profile` describes; None: steps are measured.

    Raises:
        UserError: flags contradict each other, or the run has no profile.
    """
    step_ms, run, parameters = arguments.step_ms, arguments.profile, arguments.parameters
    if step_ms is None and run is None:
        if parameters is not None:
            raise UserError("--parameters: give --step_ms or --profile, too; otherwise --model has them")
        return None
    if step_ms is not None and run is not None:
        raise UserError("--step_ms and --profile exclude each other: give only one of them")
    if parameters is None:
        raise UserError(
            f"--{'step_ms' if run is None else 'profile'}: add --parameters, the model's number of them, such as 60e6"
        )
    if not 1 <= parameters <= MOST_PARAMETERS:
        raise UserError(f"--parameters {parameters:g}: must be from 1 to {MOST_PARAMETERS:g}")
    return read_profile(Path(run)) if step_ms is None else from_step_time(step_ms, arguments.rows)


def cluster_flags(arguments: argparse.Namespace, profile: StepProfile | None) -> ClusterFlags:
    percent = arguments.straggler_percent
    return ClusterFlags(
        ranks_per_node=arguments.ranks_per_node,
        link=hop(arguments, "link", LINK if profile else None),
        node=hop(arguments, "node", NODE if profile else None),
        batch=arguments.cluster_batch_size,
        variation=percent / 100 if percent is not None else profile.variation if profile else 0.0,
    )


def hop(arguments: argparse.Namespace, kind: str, assumed: Hop | None) -> Hop | None:
    """Return the message that `--<kind>_gbit` and `--<kind>_latency_us` describe; None: it is measured."""
    gbit, microseconds = getattr(arguments, f"{kind}_gbit"), getattr(arguments, f"{kind}_latency_us")
    if assumed is None:
        if (gbit is None) != (microseconds is None):
            raise UserError(f"--{kind}_gbit and --{kind}_latency_us: give both or neither")
        return None if gbit is None else Hop(microseconds / 1e6, 8 / (gbit * 1e9))
    return Hop(
        assumed.alpha if microseconds is None else microseconds / 1e6,
        assumed.beta if gbit is None else 8 / (gbit * 1e9),
    )


def check(plan: ScalingPlan) -> None:
    """Raise `UserError` if flags contradict each other or a limit, or TMPDIR is too long."""
    check_temporary_folder()
    for ranks in (*plan.ranks, *([2] if plan.links else [])):
        if plan.batch % ranks:
            raise UserError(f"--train_batch_size {plan.batch} cannot be divided among {ranks} ranks")
    if plan.gpus and plan.links:
        raise UserError("--links: two nodes on one machine share its CPU, but there are GPUs: add --use_cpu")
    if 0 < plan.gpus < (most := max(FIT_RANKS, plan.ranks[-1])):
        raise UserError(
            f"--ranks {most}: this machine has {plan.gpus} GPU(s), each rank needs one, and predictions need "
            f"{FIT_RANKS} ranks: add --use_cpu"
        )
    if plan.ranks[-1] > MOST_RANKS:
        raise UserError(f"--ranks {plan.ranks[-1]}: at most {MOST_RANKS} on one machine")


def check_memory(plan: ScalingPlan, model: Plan) -> None:
    """Raise `UserError` if the models of all jobs, each with every strategy, exceed the free main memory."""
    if plan.gpus:
        return
    needed = 0
    for ranks in {*plan.ranks, FIT_RANKS}:
        copies = 2 if ranks == FIT_RANKS else 1  # with and without exchange
        memory = (memory.total for strategy in plan.strategies for memory in model.memory(strategy, ranks))
        needed += copies * sum(memory)
    if needed > (available := psutil.virtual_memory().available):
        raise UserError(
            f"--strategies: {len(plan.strategies)} models on each rank of all jobs take {mib(needed)} MiB, and "
            f"{mib(available)} MiB are free: give fewer --ranks or --strategies, or a smaller --model"
        )


if __name__ == "__main__":
    sys.exit(run_program(main))
