"""Train both paths with the same settings and compare the results, or compare two finished runs.

    python -m app.compare --nproc_per_node 4 --csv reviews.csv --num_train_epochs 1 --seeds 5
    python -m app.compare runs/ddp_loop/latest runs/trainer_run/latest

Without runs, it trains both paths on the same reviews, and every training flag of app.ddp_loop is accepted.
With --assert_equal, exit with status 1 unless every loss, gradient norm, prediction and weight is bitwise identical,
and name the first difference and the settings that explain it. A report is written only with --output_dir:

    python -m app.compare runs/ddp_loop/latest runs/trainer_run/latest --assert_equal

Measure the effect of each silent difference between a typical DDP script and a typical Trainer script, one at a time,
in one process that simulates the ranks, over 3 seeds:

    python -m app.compare --ablate
    python -m app.compare --ablate --seeds 2 --num_train_epochs 1 --csv reviews.csv

The results are printed and written into --output_dir: comparison.json, comparison.md and comparison.html, or
ablation.json and ablation.md.
"""

from __future__ import annotations

from .cli import OneLineParser, as_flags, count, parse_flags
from .program import check_command_line, run_program, select_precision


def add_arguments(parser: OneLineParser) -> None:
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


if __name__ == "__main__":
    check_command_line(__doc__, add_arguments)  # before torch is imported, which takes seconds

import argparse
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from .common.errors import RunError, UserError, escape_control_characters
from .common.paths import PACKAGE
from .distributed.processes import CPU_PROCESSES, resolve_nproc_per_node
from .jobs import PATHS, run_job
from .report.bitwise import check_same_rows, first_difference
from .report.explanation import IDENTICAL, conclude, explain
from .runs.folder import create_folder
from .runs.reader import Run, read_run
from .runs.schema import RUNS
from .settings import Settings


def main() -> int:
    options, settings = parse()
    if options.ablate:
        # Imported late: comparing two finished runs needs none of it.
        from .experiments.ablation import run_ablation

        return run_ablation(settings, options.nproc_per_node, options.seeds)
    pairs = [(read_run(Path(options.runs[0])), read_run(Path(options.runs[1])))] if options.runs else []
    if pairs and options.assert_equal and settings.output_dir is None:  # without a report
        a, b = pairs[0]
        check_same_rows(a, b)
        difference = first_difference(a, b)
        return print_conclusion(conclude(difference, difference and explain(a, b, difference)), True)
    # Imported late: the packages that the report needs take longer than comparing two runs.
    from .report.comparison import compare_runs, compare_seeds, conclusion_of
    from .report.render import write_comparison

    if not pairs:
        folder, pairs = train_pairs(settings, options.nproc_per_node, options.seeds)
    baselines = not options.no_baselines
    comparison = compare_seeds(pairs, baselines) if len(pairs) > 1 else compare_runs(*pairs[0], baselines)
    if options.runs:  # only now: a mistake in the runs leaves no folder
        folder = create_folder(settings.output_dir, RUNS / "comparisons")
    print(f"\n{write_comparison(comparison, folder)}")
    print(f"written to {escape_control_characters(str(folder))}/: comparison.html, comparison.md, comparison.json")
    return print_conclusion(conclusion_of(comparison), options.assert_equal)


def print_conclusion(conclusion: str, is_asserted: bool) -> int:
    """Print the last line, on standard error if it is a failure; return the exit status."""
    failed = is_asserted and conclusion != IDENTICAL
    print(escape_control_characters(conclusion), file=sys.stderr if failed else sys.stdout)
    return int(failed)


def parse() -> tuple[argparse.Namespace, Settings]:
    settings, own_flags = parse_flags(__doc__, sys.argv[1:], add_arguments)
    settings, options = select_precision(settings), argparse.Namespace(**own_flags)
    ablates: bool = options.ablate
    if ablates and (options.runs or options.assert_equal or settings.precision == "fp16"):
        raise UserError("--ablate trains in fp32 or bf16: remove the run folders, --assert_equal and --precision fp16")
    if ablates and (settings.logical_ranks is not None or settings.ddp_comm_hook != "no"):
        raise UserError("--ablate simulates plain ranks: remove --logical_ranks and --ddp_comm_hook")
    if settings.dry_run:
        raise UserError(f"--dry_run: use {PACKAGE}.plan, which plans all strategies")
    if options.runs:
        if len(options.runs) != 2:
            raise UserError(f"{len(options.runs)} run folder(s) given: name two, or none to train both paths")
        if options.seeds or options.nproc_per_node != "auto":
            raise UserError("--seeds and --nproc_per_node: have no effect on two finished runs")
        if unused := as_flags(replace(settings, output_dir=None)):
            raise UserError(f"{unused[0]}: has no effect on two finished runs: remove the flag or the run folders")
        return options, settings
    options.seeds = options.seeds or (3 if ablates else 1)
    replace(settings, seed=settings.seed + options.seeds - 1)  # a mistake, if the last seed is too large
    if ablates and options.nproc_per_node == "auto":
        options.nproc_per_node = str(CPU_PROCESSES)  # simulated in one process, whatever GPUs there are
    n = resolve_nproc_per_node(options.nproc_per_node, replace(settings, use_cpu=settings.use_cpu or ablates))
    if ablates and n & (n - 1):
        raise UserError(f"--nproc_per_node {n}: must be a power of two, because --ablate simulates logical ranks")
    options.nproc_per_node = n
    return options, settings


def train_pairs(settings: Settings, nproc_per_node: int, seeds: int) -> tuple[Path, list[tuple[Run, Run]]]:
    """Train both paths with each of several seeds, starting at `settings.seed`, one run after the other.

    Returns:
        The folder that holds all runs, and a pair of runs for each seed.
    """
    # Imported late: comparing two finished runs needs none of these.
    from .model.hub import resolve_commit
    from .model.load import load_config
    from .training.build import read_and_split

    read_and_split(settings, nproc_per_node)  # reports a mistake before any job starts
    settings = replace(settings, revision=resolve_commit(settings))  # every run starts from the same commit
    load_config(settings, settings.revision)
    folder = create_folder(settings.output_dir, RUNS / "comparisons")
    pairs = []
    for seed in range(settings.seed, settings.seed + seeds):
        pair_folder = folder if seeds == 1 else folder / f"seed-{seed}"
        seeded = replace(settings, seed=seed)
        a, b = (train_path(name, seeded, nproc_per_node, folder=pair_folder / name) for name in PATHS)
        pairs.append((a, b))
    return folder, pairs


def train_path(path_name: str, settings: Settings, nproc_per_node: int, *, folder: Path) -> Run:
    """Train one path in a torchrun job, which prints to this process's output, into a new run folder.

    Raises:
        RunError: the job failed.
    """
    print(f"\n--- {path_name}, seed {settings.seed} ---", flush=True)
    status = run_job(f"{PACKAGE}.{path_name}", replace(settings, output_dir=str(folder)), nproc_per_node)
    if status != 0:
        with suppress(OSError):
            folder.parent.rmdir()  # only if it is empty
        raise RunError(f"{path_name} failed with exit status {status}; what it has written is in {folder}")
    return read_run(folder)


if __name__ == "__main__":
    sys.exit(run_program(main))
