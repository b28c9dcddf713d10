"""The own flags of the benchmarks. They are here, without torch, so that a mistake in them is reported at once."""

from __future__ import annotations

import argparse

from ..cli import OneLineParser, count, positive
from ..common.errors import shorten
from ..common.link import Link
from ..setting_groups import TINY_BERT

# BERTs of known sizes: layers, hidden size, attention heads, intermediate size.
SIZES = {"BERT 4 x 312": (4, 312, 12, 1200), "BERT 4 x 512": (4, 512, 8, 2048), "BERT 12 x 768": (12, 768, 12, 3072)}
SHORT_NAMES = {name.removeprefix("BERT ").replace(" ", ""): name for name in SIZES}  # such as 4x312
BF16 = "-bf16"  # the end of the names of recipes that train in bf16; the others train in fp32
RECIPES = (
    *("ddp_loop", "trainer_run", f"ddp_loop{BF16}", f"trainer_run{BF16}", "tutorial"),
    *("trainer-defaults", f"trainer-defaults{BF16}"),
)
# Those that train no model.
COLLECTIVE_SECTIONS = ("collectives", "granularity", "point_to_point", "operations")
STEP_SECTIONS = ("breakdown", "buckets", "no_sync", "unused_parameters", "reduction")
DEFAULT_SECTIONS = ("collectives", *STEP_SECTIONS)
# Only with --sections: with them, the defaults would take much longer.
ON_REQUEST = (
    *("compression", "ladder", "convergence", "readiness", "batch_size"),
    *(name for name in COLLECTIVE_SECTIONS if name != "collectives"),
)
SECTIONS = (*DEFAULT_SECTIONS, *ON_REQUEST)
STEP_SECONDS = 5  # for a variant of a training step, of which there are few, in multiples of --seconds_per_point
ABOUT_SECONDS = (
    "about how long to time each collective with each size; each variant of a training step takes "
    f"{STEP_SECONDS} times as long"
)
ABOUT_SECTIONS = (
    f"which of {', '.join(SECTIONS)}; default: the first {len(DEFAULT_SECTIONS)}, and with --link "
    f"{', '.join(STEP_SECTIONS)}"
)
ABOUT_LINK = (
    "start two ranks on two nodes on this machine, with a link of so many Gbit/s and milliseconds between them, such "
    "as 1:1 (Linux, root); without torchrun"
)
SMALLEST_LIMIT = 1 / 64  # MiB: a fit needs three sizes, 1, 4 and 16 KiB


def measure_tiny_bert(parser: OneLineParser) -> None:
    """Make `tiny-bert` the default model: a benchmark is of more use with the architecture that most users train."""
    parser.set_defaults(model=TINY_BERT)


def add_memory_flags(parser: OneLineParser) -> None:
    measure_tiny_bert(parser)
    parser.add_argument("--sizes", action="store_true", help="measure BERTs of three sizes instead of --model")


def add_communication_flags(parser: OneLineParser) -> None:
    measure_tiny_bert(parser)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, metavar="NAME", help=ABOUT_SECTIONS)
    parser.add_argument("--link", type=link, metavar="RATE:DELAY", help=ABOUT_LINK)
    parser.add_argument(
        "--largest_mib", type=size_in_mib, default=256.0, metavar="X", help="largest tensor to time, in MiB"
    )
    parser.add_argument("--seconds_per_point", type=positive, default=1.0, metavar="X", help=ABOUT_SECONDS)
    parser.add_argument(
        "--seeds",
        type=count,
        default=3,
        metavar="N",
        help="training runs of each variant (compression, convergence)",
    )


def add_speed_flags(parser: OneLineParser) -> None:
    measure_tiny_bert(parser)
    sizes = ", ".join(SHORT_NAMES)
    parser.add_argument(
        "--models", nargs="+", metavar="NAME", help=f"{sizes} (untrained BERTs), or as --model; default: --model"
    )
    parser.add_argument(
        "--recipes", nargs="+", choices=RECIPES, metavar="NAME", help=f"which of {', '.join(RECIPES)}; default: all"
    )
    parser.add_argument("--ranks", type=count, default=2, metavar="N", help="ranks of each job (default: %(default)s)")
    parser.add_argument("--steps", type=count, default=60, metavar="N", help="timed optimizer steps of each job")
    parser.add_argument("--rounds", type=count, default=5, metavar="N", help="rounds, with a job of each recipe")


def add_growth_flags(parser: OneLineParser) -> None:
    rows, sizes = [10_000, 100_000, 1_000_000], "sizes (default: 10000 100000 1000000)"
    parser.add_argument("--rows", type=count, nargs="+", default=rows, metavar="N", help=sizes)
    parser.add_argument("--ranks", type=count, default=2, metavar="N", help="ranks of each job (default: %(default)s)")


def size_in_mib(text: str) -> float:
    value = positive(text)
    if not SMALLEST_LIMIT <= value <= 2**20:
        raise argparse.ArgumentTypeError(f"{shorten(text)}: must be from {SMALLEST_LIMIT:g} (16 KiB) to {2**20:,}")
    return value


def link(text: str) -> Link:
    """Parse RATE:DELAY, as the `type` of a flag."""
    rate, _, delay = text.partition(":")
    try:
        parsed = Link(positive(rate), float(delay))
    except (ValueError, argparse.ArgumentTypeError):
        parsed = None
    if parsed is None or not 0 <= parsed.delay_ms <= 1000:
        raise argparse.ArgumentTypeError(f"{shorten(text)}: must be Gbit/s:milliseconds, such as 1:5")
    return parsed
