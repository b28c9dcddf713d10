"""Predict the memory and the traffic of a training step on each rank, without loading weights or starting ranks.

    python -m app.plan --model bert-base-chinese --train_batch_size 32
    python -m app.plan --ranks 16 --ranks_per_node 8
    python -m app.plan --ranks 8 --strategy zero3 --precision bf16 --device_memory 24GiB

Any training flag applies. Rows are assumed to be padded to `--max_length`, which is the most memory that a batch can
need. With `--measure`, a few steps are trained under each strategy on this machine, and measured values are printed
next to the predicted ones. docs/strategies.md explains the formulas.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace

import datasets
import pandas as pd
import psutil
from matplotlib.figure import Figure

from ..cli import parse_flags
from ..common.charts import draw_bars
from ..common.cores import usable_cores
from ..common.errors import RunError, UserError
from ..common.files import write_text
from ..common.formats import MIB, mib, parse_size
from ..common.paths import PACKAGE
from ..distributed.processes import check_gpus, default_nproc_per_node
from ..distributed.world import Topology
from ..flags import BENCHMARKS, add_plan_flags
from ..jobs import run_job
from ..program import run_program, select_precision
from ..runs.folder import create_folder
from ..runs.schema import RUNS
from ..settings import STRATEGIES
from .step import Plan, build_plan
from .tables import describe_plan

SMALLEST_PART = 1e-3  # of the longest bar; smaller parts could not be seen


def main() -> int:
    settings, own_flags = parse_flags(__doc__, sys.argv[1:], add_plan_flags)
    settings = select_precision(settings)
    options = argparse.Namespace(**own_flags)
    datasets.disable_progress_bars()
    budget = None if options.device_memory is None else parse_size("device_memory", options.device_memory)
    ranks = default_nproc_per_node(settings) if options.ranks is None else options.ranks
    ranks_per_node = ranks if options.ranks_per_node is None else options.ranks_per_node
    if ranks < 1:
        raise UserError(f"--ranks {ranks}: must be 1 or more")
    if ranks_per_node < 1 or ranks % min(ranks_per_node, ranks):
        raise UserError(f"--ranks_per_node {ranks_per_node}: must be 1 or more, and divide --ranks {ranks}")
    plan = build_plan(settings, Topology(ranks, min(ranks_per_node, ranks)))
    if options.measure:
        check_machine(plan)
    text = describe_plan(plan, budget)
    folder = create_folder(settings.output_dir, RUNS / "plans")
    draw_memory(plan).savefig(folder / "memory.png", dpi=150)
    draw_traffic(plan).savefig(folder / "traffic.png", dpi=150)
    write_text(folder / "plan.md", f"{text}\n![Memory](memory.png)\n![Traffic](traffic.png)\n")
    print(f"{text}\nwritten to {folder}/: plan.md, memory.png, traffic.png", flush=True)
    for name in ("bench.memory", "bench.traffic") if options.measure else ():
        benchmark, defaults = f"{PACKAGE}.{name}", {field: getattr(type(settings), field) for field in BENCHMARKS[name]}
        print(f"\n# Measured: {benchmark}\n", flush=True)
        status = run_job(benchmark, replace(settings, **defaults), ranks)
        if status != 0:
            raise RunError(f"{benchmark} failed with exit status {status}")
    return 0


def check_machine(plan: Plan) -> None:
    """Check that this machine can train the plan's steps, before anything is written."""
    if plan.topology.nodes > 1:
        raise UserError("--measure: trains on this machine, which is one node: leave out --ranks_per_node")
    ranks, cores = plan.batches.ranks, len(usable_cores())
    check_gpus(ranks, plan.settings.use_cpu)
    if plan.device.type == "cuda":
        return
    if ranks > cores:
        raise UserError(
            f"--measure with --ranks {ranks}: this machine has {cores} core(s): use --ranks {cores} or fewer"
        )
    steps = [sum(memory.total + plan.activations(name).peak for memory in plan.memory(name)) for name in STRATEGIES]
    needed = max(ranks * plan.start, *steps)
    available = psutil.virtual_memory().available
    if needed > available:
        raise UserError(
            f"--measure: {ranks} ranks need about {mib(needed)} MiB of main memory, and {mib(available)} MiB are "
            "available: plan without it, or use a smaller batch"
        )


# ---- charts ----------------------------------------------------------------------------------------------------------


def draw_memory(plan: Plan) -> Figure:
    """Draw the memory of each strategy: state, activations and the rest."""
    parts = pd.DataFrame([asdict(plan.largest_memory(strategy)) for strategy in STRATEGIES])
    parts["activations"] = [plan.activations(strategy).peak for strategy in STRATEGIES]
    return draw_parts(parts.rename(columns=lambda name: name.replace("_", " ")), "MiB on the rank that needs most")


def draw_traffic(plan: Plan) -> Figure:
    """Draw the bytes that a rank sends under each strategy: gradients, parameters and the rest."""
    return draw_parts(pd.DataFrame([plan.sent(strategy) for strategy in STRATEGIES]), "MiB that a rank sends per step")


def draw_parts(parts: pd.DataFrame, label: str) -> Figure:
    """Draw one bar per strategy: a row of `parts`, in bytes."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.add_subplot(xlabel=label)
    visible = parts.columns[parts.max() > SMALLEST_PART * parts.sum(axis=1).max()]
    draw_bars(axes, STRATEGIES, {name: (parts[name] / MIB).tolist() for name in visible})
    axes.grid(visible=False)
    axes.spines[["top", "right"]].set_visible(False)
    if len(visible):
        figure.legend(loc="outside upper center", ncols=len(visible), frameon=False, fontsize="small")
    return figure


if __name__ == "__main__":
    sys.exit(run_program(main))
