"""Run many trainings in one job: starting a job takes longer than training a tiny model.

As a script it reads RUNS, a JSON file with the runs and the fields that `helpers.jobs.TrainingRun` describes, trains
them one after another in one process group, each in its working directory, and writes outcomes.json beside it.
FORKED_RANKS is the number of ranks; with RANKS_PER_NODE, they are divided among several nodes.
"""

from __future__ import annotations

import gc
import io
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import helpers.architectures  # noqa: F401  (registers its models with transformers)
from fake_cuda.report import REPORT
from helpers.forked_ranks import fork_ranks
from helpers.nodes import divide_among_nodes
from mutations import MUTATIONS
from torch.nn.parallel import DistributedDataParallel

import app.ddp_loop
import app.trainer_run
import app.training.build
from app.cli import parse_settings
from app.distributed.collectives import all_gather_object, barrier
from app.distributed.process_group import join
from app.distributed.world import World
from app.program import Program
from app.record.run_record import RunRecord
from app.settings import Settings


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)


DAMAGES = {"cut": cut, "flip_bit": flip_bit}
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
    if world.is_main_process:
        for source, target in run["copies"]:
            shutil.copytree(source, target)
        for source, target in run["moves"]:
            Path(source).rename(target)
        for change, damaged in run["damages"]:
            DAMAGES[change](Path(damaged))
    barrier(world)
    flags = [flag.replace("{rank}", str(world.rank)) for flag in run["flags"]]
    problem, inspection, out = None, {}, io.StringIO()
    REPORT.clear()
    try:
        with (
            redirect_stdout(out),
            MUTATIONS[run["mutation"]](world) if run["mutation"] else nullcontext(),
            inspect() if run["inspect"] else nullcontext({}) as inspection,
        ):
            PATHS[run["path"]].fine_tune(parse_settings(arguments=flags), world)  # type: ignore[attr-defined]
    except Exception as raised:
        problem = f"{type(raised).__name__}: {raised}"
    gc.collect()  # a DDP module must not outlive the process group
    reports = all_gather_object(vars(REPORT), world) if world.device.type == "cuda" else []
    return {"problem": problem, "out": out.getvalue(), "inspection": inspection, "reports": reports}


@contextmanager
def inspect() -> Iterator[dict[str, Any]]:
    """Record how DDP is configured (`ddp`), and what training changes in config and tokenizer (`changes`)."""
    found: dict[str, Any] = {"ddp": {}, "changes": []}
    loaded: list[Any] = []
    load, wrap, finish = app.training.build.load_classifier, DistributedDataParallel.__init__, RunRecord.finish

    def load_and_describe(*arguments: Any, **names: Any) -> Any:
        classifier = load(*arguments, **names)
        loaded[:] = [classifier.model, arguments[2], describe(classifier.model, arguments[2])]
        return classifier

    def wrap_and_record(ddp: DistributedDataParallel, *arguments: Any, **options: Any) -> None:
        wrap(ddp, *arguments, **options)
        plain = {name: x for name, x in vars(ddp).items() if isinstance(x, bool | int | float | str | None)}
        found["ddp"] |= plain | {"broadcast_buffers": ddp.broadcast_buffers}

    def compare_and_finish(record: RunRecord, *arguments: Any, **named: Any) -> None:
        model, tokenizer, before = loaded
        after = describe(model, tokenizer)
        found["changes"] += [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
        finish(record, *arguments, **named)

    with (
        patch.object(app.training.build, "load_classifier", load_and_describe),
        patch.object(DistributedDataParallel, "__init__", wrap_and_record),
        patch.object(RunRecord, "finish", compare_and_finish),
    ):
        yield found


def describe(model: Any, tokenizer: Any) -> list[str]:
    """Describe a model's config and its tokenizer, except what saving the model adds to the config."""
    generation_config = getattr(model, "generation_config", None)
    config = {name: x for name, x in model.config.to_dict().items() if name not in ("architectures", "dtype")}
    return [repr(config), repr(generation_config), repr(tokenizer), repr(tokenizer.init_kwargs)]


if __name__ == "__main__":
    fork_ranks()
    divide_among_nodes()
    Program().launch(run_all)
