"""The flags that programs add to the settings or reject. They are here so that `app.early` can parse them early."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import fields, replace

from .cli import FLAGS_OF_ONE_RUN, OneLineParser, as_flags, count, positive
from .common.errors import UserError, shorten
from .common.link import Link
from .setting_groups import TINY, TINY_BERT
from .settings import Settings

# Settings of a run that benchmarks replace with their own, such as the number of steps.
FLAGS_OF_RUNS = (
    *("num_train_epochs", "max_steps", "eval_strategy", "eval_steps", "eval_batch_size"),
    *("save_strategy", "save_steps", "save_total_limit", "on_save_failure", "resume_from_checkpoint"),
    *("load_best_model_at_end", "metric_for_best_model"),
    *("early_stopping_patience", "early_stopping_threshold", "class_weights", "label_smoothing_factor"),
    *("output_dir", "logging_steps", "profile", "report_to", "project", "run_name"),
    *("validation_file", "test_file", "dataset_name", "on_duplicates_between_parts"),
)


def all_but(*used: str) -> dict[str, str]:
    """Return the settings that a benchmark rejects, and why: all `FLAGS_OF_RUNS` but those that it uses."""
    names = (name for name in FLAGS_OF_RUNS if name not in used)
    return FLAGS_OF_ONE_RUN | dict.fromkeys(names, "has no effect on this benchmark: remove the flag")


# The benchmarks that torchrun starts, and the settings that they reject.
BENCHMARKS = {
    "bench.speed": all_but("output_dir")
    | dict.fromkeys(("precision", "bf16"), "each recipe has its own: select them with --recipes"),
    "bench.traffic": all_but(),
    "bench.memory": all_but(),
    # The trainings with compressed gradients have a number of steps, and are evaluated.
    "bench.communication": all_but("max_steps", "num_train_epochs", "eval_batch_size", "output_dir"),
}
USED_BY_PREDICT = (
    *("csv", "validation_file", "test_file", "dataset_name", "text_column", "label_column", "label_names"),
    *("max_length", "pad_to_multiple_of", "cache_dir"),
    *("revision", "attn_implementation", "trust_remote_code", "precision", "bf16", "tf32", "deterministic"),
    *("eval_batch_size", "use_cpu", "threads", "ddp_timeout", "disable_tqdm"),
)
REJECTED_BY_PREDICT = {
    field.name: "has no effect on predictions: remove the flag"
    for field in fields(Settings)
    if field.name not in USED_BY_PREDICT
} | {"model": "give the model without a flag: predict RUN_OR_MODEL"}
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


def reject_unused(settings: Settings, used: Iterable[str], where: str, *, model: str = TINY) -> None:
    """Raise `UserError` if a setting is changed that is not `used` in a part of a program, which `where` names.

    Args:
        model: the program's default of `--model`.
    """
    used = set(used)
    defaults = {name: getattr(Settings, name) for name in used - {"model"}}
    unused = [flag for flag in as_flags(replace(settings, **defaults)) if not flag.startswith("--model=")]
    if "model" not in used and settings.model != model:
        unused.append(f"--model={settings.model}")
    if unused:
        raise UserError(f"{shorten(unused[0])}: has no effect {where}")


def add_compare_flags(parser: OneLineParser) -> None:
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="two finished run folders; without them, train both paths"
    )
    parser.add_argument(
        "--nproc_per_node",
        default="auto",
        metavar="N",
        help="number of processes per run; auto: the number of GPUs if there are any, otherwise 2",
    )
    parser.add_argument(
        "--seeds", type=count, metavar="N", help="number of seeds, starting at --seed; default: 1, with --ablate 3"
    )
    parser.add_argument(
        "--assert_equal",
        action="store_true",
        help="exit with 1 unless the runs are bitwise identical; two finished runs are then compared without a report "
        "unless --output_dir is given",
    )
    parser.add_argument(
        "--no_baselines",
        action="store_true",
        help="do not train the baselines (majority class, TF-IDF with logistic regression)",
    )
    parser.add_argument("--ablate", action="store_true", help="measure the silent differences between typical scripts")


def add_plan_flags(parser: OneLineParser) -> None:
    parser.add_argument("--ranks", type=int, metavar="N", help="number of ranks; by default as `--nproc_per_node auto`")
    parser.add_argument("--ranks_per_node", type=int, metavar="N", help="by default, all ranks are on one node")
    parser.add_argument("--device_memory", metavar="SIZE", help="such as 24GiB: print what fits")
    parser.add_argument("--measure", action="store_true", help="train a few steps, and print measured values as well")


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
    parser.add_argument("--csv", metavar="PATH", help="CSV file of reviews to repeat; default: as for ddp_loop")
    rows, sizes = [10_000, 100_000, 1_000_000], "sizes (default: 10000 100000 1000000)"
    parser.add_argument("--rows", type=count, nargs="+", default=rows, metavar="N", help=sizes)
    parser.add_argument("--ranks", type=count, default=2, metavar="N", help="ranks of each job (default: %(default)s)")
    parser.add_argument(
        "--output_dir", metavar="FOLDER", help="new or empty folder (default: a new one in runs/growth/)"
    )


def add_minimal_flags(parser: OneLineParser) -> None:
    parser.add_argument("--csv", metavar="PATH", help="CSV file of reviews; default: as for ddp_loop")
    parser.add_argument("--max_steps", type=int, default=-1, help="optimizer steps to train; default: 6 epochs")
    parser.add_argument("--train_batch_size", type=int, default=32, help="rows per optimizer step, over all ranks")


def add_predict_flags(parser: OneLineParser) -> None:
    parser.add_argument(
        "run_or_model", metavar="RUN_OR_MODEL", help="folder of a run, model folder, or model on the Hub"
    )
    parser.add_argument("texts", nargs="*", default=[], metavar="TEXT", help="texts to predict instead of a CSV")
    parser.add_argument("--split", choices=("train", "validation", "test"), help="predict these rows of the run's data")
    parser.add_argument(
        "--output",
        metavar="FILE.csv",
        help="a new file; default: <CSV>-predictions.csv in the current folder, with --split <split>-predictions.csv",
    )


def add_check_flags(parser: OneLineParser) -> None:
    parser.add_argument(
        "--connect",
        type=endpoint,
        metavar="HOST:PORT",
        help="without torchrun: only try to connect to the port at which the ranks would meet",
    )


def endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not (host and port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 2**16):
        raise argparse.ArgumentTypeError(f"{shorten(text)}: must be HOST:PORT, such as 10.0.0.1:29500")
    return host.removeprefix("[").removesuffix("]"), int(port)  # an IPv6 address is in brackets


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
