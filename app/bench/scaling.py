"""Scaling: the steps of more ranks, measured on this machine, or predicted for a cluster.

    python -m app.bench.scaling --csv reviews.csv --links 1:0.1 1:5
    python -m app.bench.scaling --ranks 1 2 4 --strategies ddp zero1 zero2 zero3
    python -m app.bench.scaling --step_ms 250 --parameters 60e6 --link_gbit 100

Strong scaling: runs of app.ddp_loop with 1, 2, 4 and 8 ranks divide the same batches, on this machine's GPUs. Without
GPUs, the ranks share the CPU, and with `--links` there are runs on two network namespaces with a link between them
(needs root). Each run is a job of its own, every one once per round, every second round in the opposite order. The time
of a step is the mean of `--steps` steps after the first 5; the table has the median over the rounds, with the range.

With `--step_ms` it trains none, and predicts weak scaling (each rank has as many rows) of up to 1,024 ranks from the
time of one rank's step: buckets become ready during the backward pass, which is two thirds of the step, and each is
exchanged in a ring while the next is computed. Nothing else is modeled: no nodes, slow ranks, congestion or trees, so
it shows which term grows, not what a purchase would achieve. Writes scaling.md and scaling.json into `--output_dir`.
"""

from __future__ import annotations

from ..cli import OneLineParser, command_line, count, positive
from ..program import Program, run_program
from ..settings import OF_A_STEP, STRATEGIES, Settings
from .two_nodes import Link, link

MEASURED, PREDICTED = ("ranks", "links", "strategies"), ("parameters", "link_gbit", "link_latency_us")


def add_arguments(parser: OneLineParser) -> None:
    parser.set_defaults(model="4x312", max_length=64, threads=1)
    add = parser.add_argument
    on_machine = "on this machine (default: 1 2 4 8; at most the number of GPUs)"
    add("--ranks", type=count, nargs="+", metavar="N", help=on_machine)
    shapes = "links between two nodes on this machine, as Gbit/s:milliseconds (Linux, root)"
    add("--links", type=link, nargs="*", metavar="RATE:DELAY", help=shapes)
    strategies = f"which of {', '.join(STRATEGIES)} to compare with ddp (default: ddp only)"
    add("--strategies", choices=STRATEGIES, nargs="+", metavar="NAME", help=strategies)
    add("--steps", type=count, default=10, metavar="N", help="timed steps of a run in each round")
    add("--rounds", type=count, default=3, metavar="N", help="rounds, of which the medians are used")
    add("--step_ms", type=positive, metavar="X", help="measure nothing: a step without exchanges takes X ms")
    add("--parameters", type=positive, metavar="N", help="of the model with --step_ms, such as 60e6")
    add("--link_gbit", type=positive, metavar="X", help="Gbit/s between the ranks with --step_ms (default: 100)")
    add("--link_latency_us", type=positive, metavar="X", help="microseconds of a message with --step_ms (default: 10)")


USED = OF_A_STEP - {"strategy", "cpu_offload", "param_dtype", "reduce_dtype"} | {"output_dir"}
PROGRAM = Program(__doc__, add_arguments, only=USED)
if __name__ == "__main__":
    PROGRAM.check_command_line()  # before torch is imported, which takes seconds

import argparse
import sys
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import pandas as pd
import torch

from ..common.cores import usable_cores
from ..common.errors import UserError
from ..common.machine import describe_machine
from ..distributed.launcher import count_gpus
from ..plan.memory import BUCKET_CAP
from ..plan.traffic import FIRST_BUCKET_CAP
from ..runs.folder import create_folder
from ..runs.schema import RUNS
from .core import Page, format_seconds
from .jobs import alternate_jobs, flags_of, time_steps
from .models import with_model_folder

DEFAULT_RANKS = (1, 2, 4, 8)
LARGEST_CLUSTER = 1024  # ranks
# The backward pass computes two matrix products for each one of the forward pass: Kaplan et al., "Scaling Laws for
# Neural Language Models", 2020, section 2.1.
FORWARD_SHARE = 1 / 3
GRADIENT_BYTES = 4  # of a parameter's gradient: fp32, also in mixed precision


class Run(NamedTuple):
    """A training that is timed."""

    strategy: str
    ranks: int
    link: Link | None  # between two nodes; None: one node

    def __str__(self) -> str:
        return f"{self.strategy}, {self.ranks} rank(s)" + (f", {self.link}" if self.link else "")


def main() -> None:
    (settings, flags), (defaults, _) = PROGRAM.parse(sys.argv[1:]), PROGRAM.parse([])
    options, values = argparse.Namespace(**flags), settings.as_dict() | flags
    measures = options.step_ms is None
    unused = [name for name in (PREDICTED if measures else MEASURED) if values[name] is not None]
    if not measures:
        unused += [name for name in sorted(USED - {"output_dir", "use_cpu"}) if values[name] != getattr(defaults, name)]
    if unused:
        where = "give --step_ms, too" if measures else "with --step_ms, nothing is trained or measured: leave it out"
        raise UserError(f"--{unused[0]}: {where}")
    measure(settings, options) if measures else predict(settings, options)


def new_page(settings: Settings, facts: dict[str, str]) -> Page:
    folder = create_folder(settings.output_dir, RUNS / "scaling")
    device = torch.device("cuda", 0) if count_gpus(settings.use_cpu) else torch.device("cpu")
    return Page("Scaling", facts | describe_machine(device) | {"command": command_line()}, folder)


# ---- measured on this machine ----------------------------------------------------------------------------------------


def measure(settings: Settings, options: argparse.Namespace) -> None:
    """Time runs of every configuration, all of which train the same batches, in alternating rounds."""
    gpus = count_gpus(settings.use_cpu)
    ranks = sorted(set(options.ranks or [n for n in DEFAULT_RANKS if n <= (gpus or n)]))
    if 0 < gpus < ranks[-1]:
        raise UserError(f"--ranks {ranks[-1]}: this machine has {gpus} GPU(s), and each rank needs one: add --use_cpu")
    strategies = dict.fromkeys(("ddp", *(options.strategies or ())))
    runs = [Run(strategy, n, None) for strategy in strategies for n in ranks]
    runs += [Run("ddp", 2, link) for link in dict.fromkeys(options.links or ())]
    if gpus and runs[-1].link:
        raise UserError("--links: two nodes on one machine share its CPU, but there are GPUs: add --use_cpu")
    for run in runs:
        if settings.train_batch_size % run.ranks:
            raise UserError(f"--train_batch_size {settings.train_batch_size} cannot be divided among {run.ranks} ranks")
    flags, threads = flags_of(with_model_folder(settings)), settings.threads or 0

    def train(run: Run, steps: int) -> pd.Series:
        given = [*flags, "--strategy", run.strategy]
        return time_steps("train", given, steps=steps, ranks=run.ranks, threads=threads, link=run.link)

    train(runs[-1], 1)  # fills the cache, or reports a mistake before there is a folder
    facts = {"model": settings.model, "batch": f"{settings.train_batch_size} rows", "threads": f"{settings.threads}"}
    page = new_page(settings, facts)
    jobs = {str(run): partial(train, run, options.steps) for run in runs}
    times = alternate_jobs(jobs, options.rounds)["seconds"].unstack()[list(jobs)] / options.steps
    cores = "Each rank has a GPU." if gpus else f"All ranks share {len(usable_cores())} CPU core(s)."
    about = f"{cores} Medians, and the range, of {options.rounds} alternating rounds of {options.steps} steps."
    page.section("measured", "Strong scaling on this machine", about)
    page.numbers["seconds"] = times.to_dict("list")
    shown = {"step": times.median(), "lowest": times.min(), "highest": times.max()}
    table = pd.DataFrame(shown).map(format_seconds).rename_axis("run")
    if runs[0].ranks == 1:
        speedup = times.rdiv(times.iloc[:, 0], axis=0).median()  # T(1) / T(N), of the same round
        table["T(1) / T(N)"] = speedup.map("{:.2f}".format)
        table["efficiency"] = (speedup / [run.ranks for run in runs]).map("{:.0%}".format)
    page.table("Strong scaling", table)
    page.write("scaling")


# ---- predicted for a cluster -----------------------------------------------------------------------------------------


def ring_all_reduce(ranks: int, size: float, *, alpha: float, beta: float) -> float:
    """Return the seconds of an all-reduce, in which a message of n bytes takes alpha + beta * n seconds.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69, 2009.
    gloo's default, and NCCL's for large tensors. The time of the additions is left out.
    """
    return 2 * (ranks - 1) * (alpha + size / ranks * beta)


def bucket_sizes(parameters: float) -> list[int]:
    """Return the bytes of DDP's buckets, if each of them is filled up to its limit."""
    total = int(GRADIENT_BYTES * parameters)
    ends = [0, *range(FIRST_BUCKET_CAP, total, BUCKET_CAP), total]
    return [end - start for start, end in pairwise(ends)]


def predict_step(seconds: float, parameters: float, ranks: int, *, alpha: float, beta: float) -> float:
    """Return the seconds of a step on several ranks, each of which computes for `seconds`.

    The backward pass makes buckets of gradients ready one after another, and each is exchanged while the next is
    computed (Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020, section 3.2).
    """
    buckets, ready, end = bucket_sizes(parameters), FORWARD_SHARE * seconds, 0.0
    for size in buckets:  # they are ready at a constant rate over the backward pass
        ready += (1 - FORWARD_SHARE) * seconds * size / sum(buckets)
        end = max(ready, end) + ring_all_reduce(ranks, size, alpha=alpha, beta=beta)  # one exchange after another
    return end


def predict(settings: Settings, options: argparse.Namespace) -> None:
    """Predict weak scaling: every rank has as many rows as the one whose step takes `--step_ms`."""
    if options.parameters is None:
        raise UserError("--step_ms: add --parameters, the model's number of them, such as 60e6")
    seconds, parameters = options.step_ms / 1000, options.parameters
    alpha, beta = (options.link_latency_us or 10) / 1e6, 8e-9 / (options.link_gbit or 100)
    about = (
        f"Predicted, not measured: a rank computes for {format_seconds(seconds)}. Gradients of {parameters:,.0f} "
        f"parameters are exchanged in {len(bucket_sizes(parameters))} bucket(s), in rings whose messages take "
        f"{format_seconds(alpha)} each, and a second for {1e-9 / beta:.3g} GB."
    )
    page = new_page(settings, {})
    page.section("cluster", "A cluster", about)
    sizes = [1 << exponent for exponent in range(LARGEST_CLUSTER.bit_length())]
    steps = pd.Series({n: predict_step(seconds, parameters, n, alpha=alpha, beta=beta) for n in sizes})
    shown = {"step": steps.map(format_seconds), "efficiency": (seconds / steps).map("{:.0%}".format)}
    page.table("Weak scaling", pd.DataFrame(shown).rename_axis("ranks"))
    page.numbers["step"] = steps.to_dict()
    page.write("scaling")


if __name__ == "__main__":
    sys.exit(run_program(main))
