"""The flags that programs add to the settings. They are here, so that `app.early` can parse them without torch."""

from __future__ import annotations

import argparse

from .cli import OneLineParser, count, positive
from .common.errors import shorten

STEP_SECTIONS = ("breakdown", "buckets", "no_sync", "unused_parameters", "reduction")
SECTIONS = ("collectives", *STEP_SECTIONS, "compression")
STEP_SECONDS = 5  # for a variant of a training step, of which there are few, in multiples of --seconds_per_point
ABOUT_SECONDS = (
    "about how long to time each collective with each size; each variant of a training step takes "
    f"{STEP_SECONDS} times as long"
)
SMALLEST_LIMIT = 1 / 64  # MiB: a fit needs three sizes, 1, 4 and 16 KiB


def add_compare_flags(parser: OneLineParser) -> None:
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="two finished run folders; without them, train both paths"
    )
    parser.add_argument(
        "--nproc_per_node",
        "--nproc-per-node",
        default="auto",
        metavar="N",
        help="number of processes per run; auto: the number of GPUs if there are any, otherwise 2",
    )
    parser.add_argument("--seeds", type=int, help="number of seeds, starting at --seed; default: 1, with --ablate 3")
    parser.add_argument(
        "--assert_equal",
        "--assert-equal",
        action="store_true",
        help="exit with 1 unless the runs are bitwise identical; two finished runs are then compared without a report "
        "unless --output_dir is given",
    )
    parser.add_argument(
        "--no_baselines",
        "--no-baselines",
        action="store_true",
        help="do not train the baselines (majority class, TF-IDF with logistic regression)",
    )
    parser.add_argument("--ablate", action="store_true", help="measure the silent differences between typical scripts")


def add_plan_flags(parser: OneLineParser) -> None:
    parser.add_argument("--ranks", type=int, metavar="N", help="number of ranks; by default as `--nproc_per_node auto`")
    parser.add_argument("--ranks_per_node", type=int, metavar="N", help="by default, all ranks are on one node")
    parser.add_argument("--device_memory", metavar="SIZE", help="such as 24GiB: print what fits")
    parser.add_argument("--measure", action="store_true", help="train a few steps, and print measured values as well")


def add_memory_flags(parser: OneLineParser) -> None:
    parser.add_argument("--sizes", action="store_true", help="measure BERTs of three sizes instead of --model")


def add_communication_flags(parser: OneLineParser) -> None:
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, metavar="NAME", help=f"which of {', '.join(SECTIONS)}; default: all"
    )
    parser.add_argument(
        "--largest_mib", type=size_in_mib, default=256.0, metavar="X", help="largest tensor to time, in MiB"
    )
    parser.add_argument("--seconds_per_point", type=positive, default=1.0, metavar="X", help=ABOUT_SECONDS)
    parser.add_argument(
        "--seeds", type=count, default=3, metavar="N", help="trainings with each kind of compressed gradients"
    )


def size_in_mib(text: str) -> float:
    value = positive(text)
    if not SMALLEST_LIMIT <= value <= 2**20:
        raise argparse.ArgumentTypeError(f"{shorten(text)}: must be from {SMALLEST_LIMIT:g} (16 KiB) to {2**20:,}")
    return value
