"""The flags of app.bench.scaling. They are here so that `app.early` can parse them without torch."""

from __future__ import annotations

import argparse

from ..cli import OneLineParser, count, positive
from ..common.errors import shorten
from ..settings import STRATEGIES
from .flags import SIZES, link

DEFAULT_LINKS = ("1:0.1", "1:5", "10:0.1")  # Gbit/s and milliseconds
# Assumed where the flags say nothing: 100-Gigabit Ethernet or InfiniBand, and PCIe 4.0 with 16 lanes.
ASSUMED = {"link": ("between the nodes", 100.0, 10.0), "node": ("between the ranks of a node", 256.0, 5.0)}
MOST_PARAMETERS = 1e12
# The flags that have an effect only if something is measured, and only if nothing is.
MEASUREMENT_FLAGS = (
    *("model", "ranks", "links", "train_batch_size", "length"),
    *("threads", "steps", "rounds", "strategies", "use_cpu"),
)
CLUSTER_FLAGS = (
    *("parameters", "straggler_percent", "ranks_per_node", "cluster_batch_size"),
    *("link_gbit", "link_latency_us", "node_gbit", "node_latency_us"),
)


def add_scaling_flags(parser: OneLineParser) -> None:
    add = parser.add_argument
    names = f"{', '.join(SIZES)}, or a name or folder as in training (default: %(default)s)"
    add("--model", default=next(iter(SIZES)), metavar="NAME", help=names)
    on_machine = "on this machine (default: 1 2 4 8; at most the number of GPUs)"
    add("--ranks", type=count, nargs="+", metavar="N", help=on_machine)
    add("--use_cpu", action="store_true", help="use the CPU and gloo, even if there are GPUs")
    shapes = f"Gbit/s:milliseconds; none: no nodes (default: {' '.join(DEFAULT_LINKS)}; on GPUs: none)"
    add("--links", type=link, nargs="*", metavar="RATE:DELAY", help=f"links between two nodes, as {shapes}")
    strategies = f"which of {', '.join(STRATEGIES)} to compare with ddp (default: ddp only)"
    add("--strategies", choices=STRATEGIES, nargs="+", default=["ddp"], metavar="NAME", help=strategies)
    add("--train_batch_size", type=count, default=32, metavar="N", help="rows of a step, strong scaling (default: 32)")
    add("--rows", type=count, default=8, metavar="N", help="rows of each rank in weak scaling (default: 8)")
    add("--length", type=count, default=64, metavar="N", help="tokens of a row (default: 64)")
    add("--threads", type=count, default=1, metavar="N", help="CPU threads per rank (default: 1)")
    add("--steps", type=count, default=10, metavar="N", help="timed steps of a run in each round (default: 10)")
    add("--rounds", type=count, default=3, metavar="N", help="rounds, of which the medians are used (default: 3)")
    add("--ranks_per_node", type=count, default=8, metavar="N", help="of the cluster (default: 8)")
    add("--step_ms", type=positive, metavar="X", help="measure nothing: a step without exchanges takes X ms")
    add("--parameters", type=parameters, metavar="N", help="of the model with --step_ms, such as 60e6")
    straggler = "standard deviation of the ranks' computation in a step (default: 0)"
    add("--straggler_percent", type=percentage, default=0.0, metavar="X", help=straggler)
    add("--cluster_batch_size", type=count, default=1024, metavar="N", help="its rows, strong scaling (default: 1024)")
    for kind, (where, gbit, microseconds) in ASSUMED.items():
        about = f"Gbit/s {where} (default: {gbit:g})"
        add(f"--{kind}_gbit", type=positive, default=gbit, metavar="X", help=about)
        about = f"microseconds of a message {where} (default: {microseconds:g})"
        add(f"--{kind}_latency_us", type=positive, default=microseconds, metavar="X", help=about)
    add("--output_dir", metavar="FOLDER", help="new or empty folder (default: a new one in runs/scaling/)")


def parameters(text: str) -> float:
    value = positive(text)
    if not 1 <= value <= MOST_PARAMETERS:
        raise argparse.ArgumentTypeError(f"{shorten(text)}: must be from 1 to {MOST_PARAMETERS:g}")
    return value


def percentage(text: str) -> float:
    """Parse a standard deviation. If it were larger, the normal distribution would have many negative times."""
    value = 0.0 if text == "0" else positive(text)
    if value > 50:
        raise argparse.ArgumentTypeError(f"{shorten(text)}: must be from 0 to 50")
    return value
