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

from .cli import parse_flags
from .common.errors import RunError, UserError, escape_control_characters, shorten
from .common.paths import PACKAGE
from .distributed.processes import CPU_PROCESSES, resolve_nproc_per_node
from .flags import FLAGS_OF_RUNS, add_compare_flags, reject_unused
from .jobs import PATHS, run_job
from .program import run_program, select_precision
from .report.bitwise import check_same_rows, first_difference
from .report.explanation import IDENTICAL, conclude, explain
from .runs.folder import create_folder
from .runs.reader import Run, read_run
from .runs.schema import RUNS
from .setting_groups import LARGEST_COUNT
from .settings import Settings


def main() -> int:
    options, settings = parse()
    if options.ablate:
        # Imported late: comparing two finished runs needs none of it.
        from .experiments.ablation import run_ablation

        return run_ablation(settings, options.nproc_per_node, options.seeds or 3)
    if options.runs and options.assert_equal and settings.output_dir is None:
        return assert_equal(*(read_run(Path(run)) for run in options.runs))
    # Imported late: the packages that the report needs take longer than comparing two runs.
    from .report.comparison import compare_runs, compare_seeds, conclusion_of
    from .report.render import write_comparison

    baselines = not options.no_baselines
    if options.runs:
        a, b = (read_run(Path(run)) for run in options.runs)
        comparison = compare_runs(a, b, baselines)
        folder = create_folder(settings.output_dir, RUNS / "comparisons")
    else:
        folder, pairs = train_pairs(settings, options.nproc_per_node, options.seeds or 1)
        comparison = compare_seeds(pairs, baselines) if len(pairs) > 1 else compare_runs(*pairs[0], baselines)
    print(f"\n{write_comparison(comparison, folder)}")
    print(f"written to {escape_control_characters(str(folder))}/: comparison.html, comparison.md, comparison.json")
    return _print_conclusion(conclusion_of(comparison), options.assert_equal)


def assert_equal(a: Run, b: Run) -> int:
    """Print whether two runs are bitwise identical, without a report; return the exit status."""
    check_same_rows(a, b)
    difference = first_difference(a, b)
    return _print_conclusion(conclude(difference, difference and explain(a, b, difference)), True)


def _print_conclusion(conclusion: str, is_asserted: bool) -> int:
    """Print the last line, on standard error if it is a failure; return the exit status."""
    failed = is_asserted and conclusion != IDENTICAL
    print(escape_control_characters(conclusion), file=sys.stderr if failed else sys.stdout)
    return int(failed)


def parse() -> tuple[argparse.Namespace, Settings]:
    settings, own_flags = parse_flags(__doc__, sys.argv[1:], add_compare_flags)
    settings = select_precision(settings)
    options = argparse.Namespace(**own_flags)
    if len(options.runs) not in (0, 2):
        raise UserError(f"{len(options.runs)} run folder(s) given: name two, or none to train both paths")
    if options.runs:
        where = "on two finished runs: remove the flag or the run folders"
        reject_unused(settings, ["output_dir"], where)
        given = {"nproc_per_node": options.nproc_per_node != "auto", "seeds": options.seeds is not None}
        for name in (name for name, is_given in given.items() if is_given):
            raise UserError(f"--{name}: has no effect {where}")
    if options.seeds is not None and options.seeds < 1:
        raise UserError(f"--seeds {shorten(str(options.seeds))}: must be 1 or more")
    seeds = options.seeds or (3 if options.ablate else 1)
    if settings.seed + seeds - 1 > LARGEST_COUNT:
        raise UserError(f"--seeds {shorten(str(seeds))}: the last seed must be at most {LARGEST_COUNT}")
    plain = settings.logical_ranks is None and settings.ddp_comm_hook == "no"
    if options.ablate and (settings.precision == "fp16" or not plain):
        raise UserError(
            "--ablate simulates plain ranks: remove --logical_ranks and --ddp_comm_hook, and use --precision fp32 or "
            "bf16"
        )
    used = ("num_train_epochs", "max_steps", "eval_batch_size", "output_dir")
    for name in (name for name in FLAGS_OF_RUNS if name not in used):
        if options.ablate and getattr(settings, name) != getattr(Settings, name):
            raise UserError(f"--{name}: has no effect with --ablate: remove one of the two flags")
    if options.ablate and (options.runs or options.assert_equal):
        raise UserError("--ablate does its own training: remove the run folders and --assert_equal")
    if options.ablate and options.nproc_per_node == "auto":
        options.nproc_per_node = str(CPU_PROCESSES)  # simulated in one process, whatever GPUs there are
    if not options.runs:  # finished runs need no processes
        of_ranks = replace(settings, use_cpu=settings.use_cpu or options.ablate)
        options.nproc_per_node = resolve_nproc_per_node(options.nproc_per_node, of_ranks)
    if options.ablate and options.nproc_per_node & (options.nproc_per_node - 1):
        raise UserError(
            f"--nproc_per_node {options.nproc_per_node}: must be a power of two, because --ablate simulates the ranks "
            "as logical ranks of one process"
        )
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
        kept = f"; its files are in {folder}" if folder.exists() else ""
        raise RunError(f"{path_name} failed with exit status {status}{kept}")
    return read_run(folder)


if __name__ == "__main__":
    sys.exit(run_program(main))
