"""Train both paths with the same settings and compare the results, or compare two finished runs.

Train both paths on the same reviews (every training flag of app.ddp_loop is accepted):

    python -m app.compare
    python -m app.compare --nproc_per_node 4 --csv reviews.csv --num_train_epochs 1
    python -m app.compare --seeds 5

Compare two finished runs, using only the files in their folders:

    python -m app.compare runs/ddp_loop/latest runs/trainer_run/latest

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

import argparse
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from .cli import FLAGS_OF_ONE_RUN, parse_flags
from .common.errors import RunError, UserError, escape_control_characters
from .common.paths import PACKAGE
from .distributed.processes import CPU_PROCESSES, resolve_nproc_per_node
from .flags import add_compare_flags, all_but, reject_unused
from .jobs import PATHS, run_job
from .program import run_program, select_precision
from .report.bitwise import check_same_rows, first_difference
from .report.explanation import IDENTICAL, conclude, explain
from .runs.folder import create_folder
from .runs.reader import Run, read_run
from .runs.schema import RUNS
from .settings import Settings

# The settings that have no effect on an ablation, which simulates plain ranks in one process.
REJECTED_BY_ABLATION = all_but("num_train_epochs", "max_steps", "eval_batch_size", "output_dir")
REJECTED_BY_ABLATION |= dict.fromkeys(("logical_ranks", "ddp_comm_hook"), "has no effect with --ablate")


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
    ablates = "--ablate" in sys.argv
    rejected = REJECTED_BY_ABLATION if ablates else FLAGS_OF_ONE_RUN
    settings, own_flags = parse_flags(__doc__, sys.argv[1:], add_compare_flags, rejected=rejected)
    settings, options = select_precision(settings), argparse.Namespace(**own_flags)
    if ablates and (options.runs or options.assert_equal or settings.precision == "fp16"):
        raise UserError("--ablate trains in fp32 or bf16: remove the run folders, --assert_equal and --precision fp16")
    if options.runs:
        if len(options.runs) != 2:
            raise UserError(f"{len(options.runs)} run folder(s) given: name two, or none to train both paths")
        where = "on two finished runs: remove the flag or the run folders"
        reject_unused(settings, ["output_dir"], where)
        if options.seeds or options.nproc_per_node != "auto":
            raise UserError(f"--seeds and --nproc_per_node: have no effect {where}")
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
