"""Train both paths with the same settings and compare the results, or compare two finished runs.

    python -m app.compare --nproc_per_node 4 --csv reviews.csv --num_train_epochs 1 --seeds 5
    python -m app.compare runs/ddp_loop/latest runs/trainer_run/latest

Without runs, it trains both paths on the same reviews, and every training flag of app.ddp_loop is accepted.
With --assert_equal, exit with status 1 unless every loss, gradient norm, prediction and weight is bitwise identical,
and name the first difference and the settings that explain it. Of two finished runs, a report is then written only with
--output_dir:

    python -m app.compare runs/ddp_loop/latest runs/trainer_run/latest --assert_equal

Measure the effect of each silent difference between a typical DDP script and a typical Trainer script, one at a time,
in one process that simulates the ranks, over 3 seeds:

    python -m app.compare --ablate --num_train_epochs 1 --csv reviews.csv

The results are written into --output_dir, as comparison.html, .md and .json, or ablation.md and .json.
"""

from __future__ import annotations

from .cli import OneLineParser, as_flags, count
from .program import Program, run_program
from .settings import TYPES, Settings


def add_arguments(parser: OneLineParser) -> None:
    parser.add_argument("runs", nargs="*", metavar="RUN", help="two finished run folders; none: train both paths")
    processes = "processes per run (default: auto, which is one per GPU, or 2 without GPUs)"
    parser.add_argument("--nproc_per_node", default="auto", metavar="N", help=processes)
    parser.add_argument("--seeds", type=count, metavar="N", help="seeds, from --seed on (default: 1, with --ablate 3)")
    parser.add_argument("--assert_equal", action="store_true", help="exit with 1 unless the runs are bitwise identical")
    baselines = "do not train the baselines (majority class, TF-IDF with logistic regression)"
    parser.add_argument("--no_baselines", action="store_true", help=baselines)
    parser.add_argument("--ablate", action="store_true", help="measure the silent differences between typical scripts")


SHOWN = ("accuracy", "f1", "loss", "world_size", "train_seconds", "train_examples_per_second")  # on the terminal
PROGRAM = Program(__doc__, add_arguments, only=TYPES.keys() - {"dry_run"})  # app.plan plans all strategies
if __name__ == "__main__":
    PROGRAM.check_command_line()  # before torch is imported, which takes seconds

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from .common.errors import RunError, UserError, escape_control_characters
from .common.paths import PACKAGE
from .distributed.launcher import resolve_nproc_per_node
from .jobs import BLOCKS, PATHS, run_job
from .report.bitwise import check_same_rows, first_difference
from .report.explanation import conclude, explain
from .runs.folder import create_folder
from .runs.reader import Run, read_run
from .runs.schema import RUNS


def main() -> int:
    settings, options = PROGRAM.parse(sys.argv[1:])
    check_flags(settings, options)
    if options["ablate"]:
        # Imported late, like all that trains or draws: comparing two finished runs needs none of it.
        from .experiments.ablation import run_ablation

        return run_ablation(settings, options["nproc_per_node"], options["seeds"] or 3)
    runs, asserts = options["runs"], options["assert_equal"]
    folder, pairs = (None, [[read_run(Path(run)) for run in runs]]) if runs else train_pairs(settings, options)
    a, b = pairs[0]
    if runs and asserts and settings.output_dir is None:  # without a report
        check_same_rows(a, b)
        difference = first_difference(a, b)
        explanation = difference and explain(a, b, difference)
    else:
        from .report.comparison import compare_runs, compare_seeds
        from .report.render import write_comparison

        baselines = not options["no_baselines"]
        comparison = compare_seeds(pairs, baselines) if len(pairs) > 1 else compare_runs(a, b, baselines)
        # Only now: a mistake in the runs leaves no folder.
        folder = folder or create_folder(settings.output_dir, RUNS / "comparisons")
        write_comparison(comparison, folder)
        print_summary(comparison)
        difference, explanation = comparison["first_difference"], comparison["explanation"]
    failed = asserts and difference is not None
    print(escape_control_characters(conclude(difference, explanation)), file=sys.stderr if failed else sys.stdout)
    if folder:
        print(f"open {escape_control_characters(str(folder / 'comparison.html'))}")
    return int(failed)


def print_summary(comparison: dict[str, Any]) -> None:
    """Print the main results of two runs, or of the first seed, as a table, and the verdict. The page has all."""
    from .report.render import COSTS, SCORES, metric_rows

    rows = metric_rows(comparison, [metric for metric in SCORES + COSTS if metric[1] in SHOWN])
    header = [*map(escape_control_characters, comparison["names"]), "difference"]
    index = [escape_control_characters(row["name"]) for row in rows]  # one contains the name of a class
    table = pd.DataFrame([[*row["cells"], row["difference"]] for row in rows], index, header)
    print(f"\n{table.to_string()}\n")
    if "seeds" in comparison or not comparison["same_predictions"]:  # otherwise it adds nothing to the conclusion
        print(escape_control_characters(comparison["verdict"]))


def check_flags(settings: Settings, options: dict[str, Any]) -> None:
    """Raise `UserError` if the mode that some flags choose leaves others without effect."""
    runs, defaults = options["runs"], {"nproc_per_node": "auto", "seeds": None, "ablate": False}
    if runs and len(runs) != 2:
        raise UserError(f"{len(runs)} run folder(s) given: name two, or none to train both paths")
    unused = ["--assert_equal"] if options["ablate"] and options["assert_equal"] else []
    if runs:
        unused += [f"--{name}" for name, value in defaults.items() if options[name] != value]
        unused += as_flags(replace(settings, output_dir=None))
    if unused:
        raise UserError(f"{unused[0]}: has no effect on {'two finished runs' if runs else '--ablate'}: leave it out")


def train_pairs(settings: Settings, options: dict[str, Any]) -> tuple[Path, list[list[Run]]]:
    """Train both paths with each of several seeds, starting at `settings.seed`, one run after the other.

    Returns:
        The folder that holds all runs, and a pair of runs for each seed.

    Raises:
        RunError: a job failed.
    """
    from .model.hub import resolve_commit
    from .training.build import read_and_split

    ranks, seeds = resolve_nproc_per_node(options["nproc_per_node"], settings), options["seeds"] or 1
    read_and_split(settings, ranks)  # reports a mistake before any job starts
    settings = replace(settings, revision=resolve_commit(settings))  # every run starts from the same commit
    folder = create_folder(settings.output_dir, RUNS / "comparisons")
    pairs = []
    for seed in range(settings.seed, settings.seed + seeds):
        runs = []
        for path_name in PATHS:
            run = folder / (f"seed-{seed}" if seeds > 1 else "") / path_name
            print(f"\n--- {path_name}, seed {seed} ---", flush=True)
            blocks = "start" if path_name == PATHS[0] else "none"  # the second run's would be the same
            seeded = replace(settings, seed=seed, output_dir=str(run))
            status = run_job(f"{PACKAGE}.{path_name}", seeded, ranks, **{BLOCKS: blocks})
            if status != 0:
                raise RunError(f"{path_name} failed with exit status {status}; what it has written is in {run}")
            runs.append(read_run(run))
        pairs.append(runs)
    return folder, pairs


if __name__ == "__main__":
    sys.exit(run_program(main))
