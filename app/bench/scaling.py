"""Strong and weak scaling: measured on this machine, or predicted for a cluster.

    python -m app.bench.scaling
    python -m app.bench.scaling --ranks 1 2 --links 1:5 --rounds 5
    python -m app.bench.scaling --ranks 1 2 4 --links --strategies ddp zero1 zero2 zero3
    python -m app.bench.scaling --step_ms 250 --parameters 60e6 --link_gbit 100 --straggler_percent 3

Trains short runs of app.ddp_loop with 1, 2, 4 and 8 ranks on this machine's GPUs. Without GPUs, the ranks share the
CPU, and there are runs on two network namespaces with a link between them (needs root; left out otherwise). With
`--step_ms` it trains none, and predicts a cluster of up to 1,024 ranks from the time of one rank's step. Writes
scaling.html, .md and .json into `--output_dir`. docs/scaling.md explains what is measured, and the formulas.
"""

from __future__ import annotations

if __name__ == "__main__":
    from ..program import check_command_line
    from .scaling_flags import add_scaling_flags

    check_command_line(__doc__, add_scaling_flags, only=())

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch

from ..cli import OneLineParser, command_line
from ..common.cores import usable_cores
from ..common.errors import UserError
from ..common.link import Link
from ..common.machine import describe_machine
from ..distributed.processes import count_gpus
from ..program import run_program
from ..runs.folder import create_folder
from ..runs.schema import RUNS
from .cluster import Cluster, Hop, Step, show_cluster
from .core import Page, format_seconds
from .flags import link
from .jobs import alternate_jobs, time_steps
from .models import CHINESE, model_folder
from .scaling_flags import CLUSTER_FLAGS, DEFAULT_LINKS, MEASUREMENT_FLAGS, add_scaling_flags
from .two_nodes import NamespacesUnavailable, two_nodes

DEFAULT_RANKS = (1, 2, 4, 8)
LONGER = 4  # characters of a row for each of its tokens, so that every tokenizer has to truncate it


class Run(NamedTuple):
    """A training that is timed. The same one may be a point of strong and of weak scaling."""

    strategy: str
    ranks: int
    link: Link | None  # between two nodes; None: one node
    batch: int  # rows of a step, over all ranks

    def __str__(self) -> str:
        place = f"{self.ranks} ranks, {self.link}" if self.link else f"{self.ranks} rank(s)"
        return f"{self.strategy}, {place}, {self.batch} rows"


def main() -> int:
    parser = OneLineParser(description=__doc__)
    add_scaling_flags(parser)
    arguments = parser.parse_args()
    measures = arguments.step_ms is None
    for name in CLUSTER_FLAGS if measures else MEASUREMENT_FLAGS:
        if getattr(arguments, name) != parser.get_default(name):
            where = "give --step_ms, too" if measures else "with --step_ms, nothing is measured"
            raise UserError(f"--{name}: {where}")
    measure(arguments) if measures else predict(arguments)
    return 0


def predict(arguments: argparse.Namespace) -> None:
    """Predict a cluster, without measuring anything."""
    if arguments.parameters is None:
        raise UserError("--step_ms: add --parameters, the model's number of them, such as 60e6")
    variation = arguments.straggler_percent / 100
    step = Step(arguments.step_ms / 1000, arguments.rows, arguments.parameters, variation)
    node, between = (
        Hop(getattr(arguments, f"{kind}_latency_us") / 1e6, 8e-9 / getattr(arguments, f"{kind}_gbit"))
        for kind in ("node", "link")
    )
    page = new_page(arguments, {})
    show_cluster(page, step, Cluster(arguments.ranks_per_node, node, between), batch=arguments.cluster_batch_size)
    page.write("scaling")


def new_page(arguments: argparse.Namespace, facts: dict[str, str]) -> Page:
    folder = create_folder(arguments.output_dir, RUNS / "scaling")
    device = torch.device("cuda", 0) if count_gpus(arguments.use_cpu) else torch.device("cpu")
    facts |= describe_machine(device) | {"threads": str(arguments.threads), "command": command_line()}
    return Page("Scaling", facts, folder)


# ---- measured on this machine ----------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> None:
    """Time runs of every configuration in alternating rounds, and show strong and weak scaling."""
    gpus = count_gpus(arguments.use_cpu)
    ranks = sorted(set(arguments.ranks or [n for n in DEFAULT_RANKS if n <= (gpus or n)]))
    links = usable_links(arguments.links, gpus)
    for n in (*ranks, *([2] if links else [])):
        if arguments.train_batch_size % n:
            raise UserError(f"--train_batch_size {arguments.train_batch_size} cannot be divided among {n} ranks")
        if 0 < gpus < n:
            raise UserError(f"--ranks {n}: this machine has {gpus} GPU(s), and each rank needs one: add --use_cpu")
    places: list[tuple[str, int, Link | None]] = [
        (strategy, n, None) for strategy in dict.fromkeys(("ddp", *arguments.strategies)) for n in ranks
    ]
    places += [("ddp", 2, link) for link in links]
    modes = {
        "strong": [Run(*place, batch=arguments.train_batch_size) for place in places],
        "weak": [Run(*place, batch=place[1] * arguments.rows) for place in places],
    }
    runs = {str(run): run for of_mode in modes.values() for run in of_mode}
    with tempfile.TemporaryDirectory(prefix="samebits-") as name:
        folder = Path(name)
        write_rows(folder / "rows.csv", max(run.batch for run in runs.values()), arguments.length)
        flags = ["--csv", folder / "rows.csv", "--cache_dir", folder / "cache", "--max_length", arguments.length]
        flags += ["--model", model_folder(arguments.model, folder / "model"), *([] if gpus else ["--use_cpu"])]
        train = partial(time_run, flags=flags, threads=arguments.threads)
        train(Run("ddp", 1, None, 8), steps=1)  # fills the cache, or reports a mistake before there is a folder
        page = new_page(arguments, {"model": f"{arguments.model}, {arguments.length} tokens per row"})
        jobs = {name: partial(train, run, steps=arguments.steps) for name, run in runs.items()}
        seconds = alternate_jobs(jobs, arguments.rounds)["seconds"].unstack() / arguments.steps
    cores = "Each rank has a GPU." if gpus else f"All ranks share {len(usable_cores())} CPU core(s)."
    about = f"{cores} Medians, and the range, of {arguments.rounds} alternating rounds of {arguments.steps} steps."
    page.section("measured", "Strong and weak scaling on this machine", about)
    for mode, of_mode in modes.items():
        show(page, mode, of_mode, seconds=seconds)
    page.write("scaling")


def usable_links(requested: Sequence[Link] | None, gpus: int) -> list[Link]:
    """Return the links to measure: those that the user or the default requests, if this machine can have two nodes."""
    if gpus:
        if requested:
            raise UserError("--links: two nodes on one machine share its CPU, but there are GPUs: add --use_cpu")
        return []
    links = list(map(link, DEFAULT_LINKS)) if requested is None else list(dict.fromkeys(requested))
    try:
        for first in links[:1]:
            with two_nodes(first):
                pass
    except NamespacesUnavailable as problem:
        print(f"not measured: two nodes: {problem}")
        return []
    return links


def write_rows(path: Path, batch: int, length: int) -> None:
    """Write reviews of random characters. All are truncated to the same length, so every rank does the same work."""
    generator = random.Random(0)
    texts = ("".join(generator.choices(CHINESE, k=LONGER * length)) for _ in range(4 * batch))
    path.write_text("label,review\n" + "".join(f"{i % 2},{text}\n" for i, text in enumerate(texts)), encoding="utf-8")


def time_run(run: Run, *, steps: int, threads: int, flags: Sequence[Any]) -> pd.Series:
    flags = [*flags, "--strategy", run.strategy, "--train_batch_size", run.batch]
    return time_steps("train", flags, steps=steps, ranks=run.ranks, threads=threads, link=run.link)


def show(page: Page, mode: str, runs: Sequence[Run], *, seconds: pd.DataFrame) -> None:
    """Show a table of one kind of scaling, and a chart if there is a run of one rank, which comes first.

    Args:
        seconds: of a step: a row for each round, a column for each run.
    """
    times, ranks = seconds[[str(run) for run in runs]], [run.ranks for run in runs]
    page.numbers[mode] = times.to_dict("list")
    shown = {"step": times.median(), "lowest": times.min(), "highest": times.max()}
    table = pd.DataFrame(shown).map(format_seconds).rename_axis("run")
    if ranks[0] == 1:
        speedup = times.rdiv(times.iloc[:, 0], axis=0).median()  # T(1) / T(N), of the same round
        table["T(1) / T(N)"] = speedup.map("{:.2f}".format)
        table["efficiency"] = (speedup / (ranks if mode == "strong" else 1)).map("{:.0%}".format)
        curves = pd.Series({(run.ranks, run.strategy): speedup[str(run)] for run in runs if not run.link}).unstack()
        label = "speedup over one rank" if mode == "strong" else "efficiency"
        page.chart(f"{mode} scaling: {label}", curves.rename_axis("ranks"), label)
    page.table(f"{mode} scaling", table)


if __name__ == "__main__":
    sys.exit(run_program(main))
