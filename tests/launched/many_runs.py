"""Run many trainings in one job: starting a job takes longer than training a tiny model.

As a script it reads RUNS, a JSON file with the runs and the fields that `helpers.jobs.TrainingRun` describes, trains
them one after another in one process group, each in its working directory, and writes outcomes.json beside it.
With RANKS_PER_NODE, the ranks are divided among several nodes.
"""

from __future__ import annotations

import gc
import io
import json
import os
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import helpers.architectures  # noqa: F401  (registers its models with transformers)
from fake_cuda.report import REPORT

import app.ddp_loop
import app.strategies.optimization as optimization
import app.trainer_run
from app.cli import parse_settings
from app.distributed.collectives import all_gather_object
from app.distributed.process_group import join
from app.distributed.world import World
from app.program import Program
from app.settings import Settings

PATHS = {"ddp_loop": app.ddp_loop, "trainer_run": app.trainer_run}


def run_all(settings: Settings) -> None:
    file = Path(os.environ["RUNS"])
    with join(settings) as world:
        outcomes = [train(run, world) for run in json.loads(file.read_text())]
        if world.is_main_process:
            file.with_name("outcomes.json").write_text(json.dumps(outcomes))


def train(run: dict[str, Any], world: World) -> dict[str, Any]:
    """Train one run. Return its outcome: the fields of `helpers.jobs.Outcome`."""
    os.chdir(run["cwd"])
    flags = [str(flag).replace("{rank}", str(world.rank)) for flag in run["flags"]]
    problem, out = None, io.StringIO()
    loss_scale = patch.object(optimization, "INITIAL", run["loss_scale"] or optimization.INITIAL)
    REPORT.clear()
    try:
        with redirect_stdout(out), loss_scale:
            PATHS[run["path"]].fine_tune(parse_settings(arguments=flags), world)  # type: ignore[attr-defined]
    except Exception as raised:
        problem = f"{type(raised).__name__}: {raised}"
    gc.collect()  # a DDP module must not outlive the process group
    reports = all_gather_object(vars(REPORT), world) if world.device.type == "cuda" else []
    return {"problem": problem, "out": out.getvalue(), "reports": reports}


def divide_among_nodes() -> None:
    """Let the ranks of a torchrun job be on several nodes, RANKS_PER_NODE on each, if that variable is set."""
    inside = int(os.environ.get("RANKS_PER_NODE", "0"))
    if not inside:
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    nodes, rest = divmod(size, inside)
    assert rest == 0, f"{size} ranks, {inside} per node"
    variables = {"LOCAL_WORLD_SIZE": inside, "LOCAL_RANK": rank % inside}
    variables |= {"GROUP_WORLD_SIZE": nodes, "GROUP_RANK": rank // inside}
    os.environ |= {name: str(number) for name, number in variables.items()}


if __name__ == "__main__":
    divide_among_nodes()
    Program().launch(run_all)
