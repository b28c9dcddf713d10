"""Strong and weak scaling: measured on this machine, predicted from two ranks, and extrapolated to a cluster.

    python -m app.bench.scaling
    python -m app.bench.scaling --ranks 1 2 --links 1:5 --rounds 3
    python -m app.bench.scaling --links --link_gbit 100 --link_latency_us 10

Starts torchrun jobs with 1, 2, 4 and 8 ranks on this machine's CPU, and one on two network namespaces with a shaped
link between them (needs root; left out otherwise). Writes scaling.html and scaling.json into `--output_dir`.
docs/scaling.md explains the measurements, the model that predicts them and clusters of up to 1,024 ranks, and the page.
"""

from __future__ import annotations

import argparse
import sys

from ...cli import OneLineParser, count, positive
from ...common.cores import usable_cores
from ...common.errors import UserError, escape_control_characters, shorten
from ...common.files import write_json, write_text
from ...program import run_program
from ...runs.folder import create_folder
from ...runs.schema import RUNS
from ..harness import SIZES
from ..page import as_html, as_markdown
from .cluster import ClusterFlags, Hop
from .measure import ScalingPlan, measure, open_jobs
from .nodes import Link
from .predict import fit
from .report import describe, raw_data, sections
from .task_job import check_temporary_folder

TITLE = "Scaling"
DEFAULT_LINKS = ("1:0.1", "1:1", "1:5", "10:0.1", "10:1", "10:5")  # Gbit/s and milliseconds
MOST_RANKS = 64  # on one machine


def main() -> int:
    arguments = parse()
    plan = ScalingPlan(
        size=arguments.model,
        ranks=sorted(set(arguments.ranks)),
        links=list(dict.fromkeys(arguments.links)),
        batch=arguments.train_batch_size,
        rows=arguments.rows,
        length=arguments.length,
        steps=arguments.steps,
        rounds=arguments.rounds,
        threads=arguments.threads,
    )
    check(plan)
    cluster = ClusterFlags(
        ranks_per_node=arguments.ranks_per_node,
        link=hop(arguments, "link"),
        node=hop(arguments, "node"),
        batch=arguments.cluster_batch_size,
    )
    folder = create_folder(arguments.output_dir, RUNS / "scaling")
    with open_jobs(plan, folder) as jobs:
        rounds = measure(plan, jobs)
        method = jobs.nodes[1].method if jobs.nodes else None
    n_cores = len(usable_cores())
    fits = fit(rounds, n_cores, plan.threads)
    facts = describe(plan, method)
    report = sections(plan, rounds, fits, flags=cluster, n_cores=n_cores)
    for section in report:
        print(f"\n{as_markdown(section)}")
    write_json(folder / "scaling.json", {"machine": facts, **raw_data(plan, rounds, fits, report=report)})
    write_text(folder / "scaling.html", as_html(TITLE, facts, report, json_name="scaling.json"))
    print(escape_control_characters(f"written to {folder}/: scaling.html, scaling.json"))
    return 0


def parse() -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    add = parser.add_argument
    add("--model", choices=list(SIZES), default=next(iter(SIZES)), help="architecture (default: %(default)s)")
    add("--ranks", type=count, nargs="+", default=[1, 2, 4, 8], metavar="N", help="on this machine (default: 1 2 4 8)")
    links = f"links between two nodes, as Gbit/s:milliseconds; none: no nodes (default: {' '.join(DEFAULT_LINKS)})"
    add("--links", type=link, nargs="*", default=[link(x) for x in DEFAULT_LINKS], metavar="RATE:DELAY", help=links)
    add("--train_batch_size", type=count, default=32, metavar="N", help="rows of a step, strong scaling (default: 32)")
    add("--rows", type=count, default=8, metavar="N", help="rows of each rank in weak scaling (default: 8)")
    add("--length", type=count, default=64, metavar="N", help="tokens of a row, at most 512 (default: 64)")
    add("--threads", type=count, default=1, metavar="N", help="CPU threads per rank (default: 1)")
    add("--steps", type=count, default=3, metavar="N", help="steps of a configuration in each round (default: 3)")
    add("--rounds", type=count, default=5, metavar="N", help="rounds, of which the medians are used (default: 5)")
    add("--ranks_per_node", type=count, default=8, metavar="N", help="of the predicted cluster (default: 8)")
    add("--cluster_batch_size", type=count, default=1024, metavar="N", help="its rows, strong scaling (default: 1024)")
    add("--link_gbit", type=positive, metavar="X", help="rate between its nodes (default: measured, unshaped link)")
    add("--link_latency_us", type=positive, metavar="X", help="latency between its nodes in microseconds")
    add("--node_gbit", type=positive, metavar="X", help="rate between the ranks of a node (default: measured)")
    add("--node_latency_us", type=positive, metavar="X", help="latency between the ranks of a node in microseconds")
    add("--output_dir", metavar="FOLDER", help="new or empty folder (default: a new one in runs/scaling/)")
    return parser.parse_args()


def hop(arguments: argparse.Namespace, kind: str) -> Hop | None:
    """Return the message that `--<kind>_gbit` and `--<kind>_latency_us` describe; None: neither is given."""
    gbit, microseconds = getattr(arguments, f"{kind}_gbit"), getattr(arguments, f"{kind}_latency_us")
    if (gbit is None) != (microseconds is None):
        raise UserError(f"--{kind}_gbit and --{kind}_latency_us: give both or neither")
    return None if gbit is None else Hop(microseconds / 1e6, 8 / (gbit * 1e9))


def check(plan: ScalingPlan) -> None:
    """Raise `UserError` if flags contradict each other or a limit, or TMPDIR is too long."""
    check_temporary_folder()
    for ranks in (*plan.ranks, *([2] if plan.links else [])):
        if plan.batch % ranks:
            raise UserError(f"--train_batch_size {plan.batch} cannot be divided among {ranks} ranks")
    if plan.ranks[-1] > MOST_RANKS:
        raise UserError(f"--ranks {plan.ranks[-1]}: at most {MOST_RANKS} on one machine")
    if plan.length > 512:
        raise UserError(f"--length {plan.length}: must be at most 512, which is what BERT's position embedding has")


def link(text: str) -> Link:
    rate, _, delay = text.partition(":")
    try:
        parsed = Link(positive(rate), float(delay))
    except (ValueError, argparse.ArgumentTypeError):
        parsed = None
    if parsed is None or not 0 <= parsed.delay_ms <= 1000:
        raise argparse.ArgumentTypeError(f"{shorten(text)}: must be Gbit/s:milliseconds, such as 1:5")
    return parsed


if __name__ == "__main__":
    sys.exit(run_program(main))
