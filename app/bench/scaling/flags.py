"""The flags of app.bench.scaling. They are here so that `app.early` can parse them without torch."""

from __future__ import annotations

import argparse

from ...cli import OneLineParser, count, positive
from ...common.errors import shorten
from ...flags import SIZES, link
from ...settings import STRATEGIES
from .configuration import LINK, NODE

DEFAULT_LINKS = ("1:0.1", "1:1", "1:5", "10:0.1", "10:1", "10:5")  # Gbit/s and milliseconds


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
    add("--steps", type=count, default=3, metavar="N", help="steps of a configuration in each round (default: 3)")
    add("--rounds", type=count, default=5, metavar="N", help="rounds, of which the medians are used (default: 5)")
    add("--ranks_per_node", type=count, default=8, metavar="N", help="of the predicted cluster (default: 8)")
    add("--step_ms", type=positive, metavar="X", help="measure nothing: a step without exchanges takes X ms")
    add("--profile", metavar="RUN", help="the same, from the folder of a run with --profile N")
    add("--parameters", type=positive, metavar="N", help="of the model with --step_ms or --profile, such as 60e6")
    straggler = "standard deviation of the ranks' computation in a step (default: that of the --profile, otherwise 0)"
    add("--straggler_percent", type=percentage, metavar="X", help=straggler)
    add("--cluster_batch_size", type=count, default=1024, metavar="N", help="its rows, strong scaling (default: 1024)")
    assumed = " (default: measured; with --step_ms or --profile: {:g})"
    for kind, where, default in (("link", "between its nodes", LINK), ("node", "between the ranks of a node", NODE)):
        rate, latency = (assumed.format(number) for number in (8e-9 / default.beta, default.alpha * 1e6))
        add(f"--{kind}_gbit", type=positive, metavar="X", help=f"Gbit/s {where}{rate}")
        add(f"--{kind}_latency_us", type=positive, metavar="X", help=f"microseconds of a message {where}{latency}")
    add("--output_dir", metavar="FOLDER", help="new or empty folder (default: a new one in runs/scaling/)")


def percentage(text: str) -> float:
    """Parse a standard deviation. If it were larger, the normal distribution would have many negative times."""
    value = 0.0 if text == "0" else positive(text)
    if value > 50:
        raise argparse.ArgumentTypeError(f"{shorten(text)}: must be from 0 to 50")
    return value
