"""Predict the memory and the traffic of a training step on each rank, without loading weights or starting ranks.

    python -m app.plan --model bert-base-chinese --train_batch_size 32
    python -m app.plan --ranks 16 --ranks_per_node 8
    python -m app.plan --ranks 8 --strategy zero3 --precision bf16 --device_memory 24GiB

Takes the flags or the --config of the training run that it is about. Rows are assumed to be padded to `--max_length`,
which is the most memory that a batch can need. With `--measure`, a few steps are trained under each strategy on this
machine, and measured values are printed next to the predicted ones. docs/strategies.md explains the formulas.
"""

from __future__ import annotations

from ..cli import OneLineParser, count
from ..program import Program, run_program, select_precision
from ..settings import OF_A_STEP, TYPES, Settings


def add_arguments(parser: OneLineParser) -> None:
    parser.add_argument("--ranks", type=count, metavar="N", help="number of ranks; default: as `--nproc_per_node auto`")
    parser.add_argument("--ranks_per_node", type=count, metavar="N", help="by default, all ranks are on one node")
    parser.add_argument("--device_memory", metavar="SIZE", help="such as 24GiB: print what fits")
    parser.add_argument("--measure", action="store_true", help="train a few steps, and print measured values as well")


PROGRAM = Program(__doc__, add_arguments, only=TYPES.keys() - {"dry_run"})
if __name__ == "__main__":
    PROGRAM.check_command_line()  # before torch is imported, which takes seconds

import argparse
import sys

from accelerate.utils import convert_file_size_to_int

from ..common.errors import RunError, UserError, shorten
from ..common.files import write_text
from ..common.paths import PACKAGE
from ..distributed.launcher import resolve_nproc_per_node
from ..distributed.world import Topology
from ..jobs import run_job
from ..runs.folder import create_folder
from ..runs.schema import RUNS
from .report import describe_plans
from .step import build_plan


def main() -> int:
    settings, own_flags = PROGRAM.parse(sys.argv[1:])
    settings = select_precision(settings)
    options = argparse.Namespace(**own_flags)
    try:
        budget = None if options.device_memory is None else convert_file_size_to_int(options.device_memory)
        if budget == 0:
            raise ValueError
    except (ValueError, OverflowError):
        size = shorten(options.device_memory)
        raise UserError(f"--device_memory {size}: must be a number with a unit, such as 24GiB or 80GB") from None
    ranks: int = options.ranks or resolve_nproc_per_node("auto", settings)
    ranks_per_node: int = min(options.ranks_per_node or ranks, ranks)
    if ranks % ranks_per_node:
        raise UserError(f"--ranks_per_node {ranks_per_node}: must divide --ranks {ranks}")
    if options.measure and ranks_per_node < ranks:
        raise UserError("--measure: trains on this machine, which is one node: leave out --ranks_per_node")
    plan = build_plan(settings, Topology(ranks, ranks_per_node))
    text = describe_plans(plan.with_each_strategy(), budget)
    folder = create_folder(settings.output_dir, RUNS / "plans")
    write_text(folder / "plan.md", text)
    print(f"{text}\nwritten to {folder}/plan.md", flush=True)
    if options.measure:
        measure(settings, ranks)
    return 0


def measure(settings: Settings, ranks: int) -> None:
    """Train a few steps with each strategy, and print what they need and send next to what is predicted.

    Raises:
        RunError: a benchmark failed, or measured something else than was predicted.
    """
    rows = settings.csv if settings.dataset_name else str(settings.csv_path)  # those of the plan
    of_a_step = Settings(**{name: getattr(settings, name) for name in OF_A_STEP} | {"csv": rows})
    for name in ("bench.memory", "bench.traffic"):
        benchmark = f"{PACKAGE}.{name}"
        print(f"\n# Measured: {benchmark}\n", flush=True)
        status = run_job(benchmark, of_a_step, ranks)
        if status != 0:
            raise RunError(f"{benchmark} failed with exit status {status}")


if __name__ == "__main__":
    sys.exit(run_program(main))
