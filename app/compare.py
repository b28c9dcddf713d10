"""Walk both roads with one set of settings and compare, or compare two runs that are there.

Train both on the same reviews, two processes each (every training flag of app.ddp_loop is accepted):

    python -m app.compare
    python -m app.compare --nproc_per_node 4 --csv reviews.csv --num_train_epochs 1
    python -m app.compare --seeds 5

Compare two finished runs, which nothing but their folders is known of; the second form exits 0 only where every loss,
gradient norm, prediction and weight is equal to the bit, and else names the first difference and exits 1:

    python -m app.compare runs/ddp_loop/latest runs/trainer_run/latest
    python -m app.compare runs/ddp_loop/latest runs/trainer_run/latest --assert_equal

What does each silent difference of the usual pair of scripts do? One at a time, in one process, over 3 seeds:

    python -m app.compare --ablate
    python -m app.compare --ablate --seeds 2 --num_train_epochs 1 --csv reviews.csv

The figures are printed and written as comparison.json, comparison.md and comparison.html (ablation.json and
ablation.md) into --output_dir.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from app.cli import settings_parser
from app.errors import RunError, UserError, escape_control_characters, escape_unencodable_output, shorten
from app.experiments.train_pair import train_pairs
from app.files import write_json, write_text
from app.report.comparison import compare_runs, compare_seeds, first_difference_of
from app.report.render import write_comparison
from app.runs.folder import create_folder
from app.runs.reader import read_run
from app.runs.schema import RUNS
from app.settings import LARGEST_COUNT, Settings

OWN = ("runs", "nproc_per_node", "seeds", "assert_equal", "baselines", "ablate")  # flags that no training has


def main() -> int:
    escape_unencodable_output()
    try:
        asked, settings = parse()
        if asked.ablate:
            return ablate_recipe(settings, asked.nproc_per_node, asked.seeds or 3)
        if asked.runs:
            a, b = (read_run(Path(run)) for run in asked.runs)
            comparison = compare_runs(a, b, asked.baselines)
            folder = create_folder(settings.output_dir, RUNS / "comparisons")
        else:
            folder, pairs = train_pairs(settings, asked.nproc_per_node, asked.seeds or 1)
            if len(pairs) > 1:
                comparison = compare_seeds(pairs, asked.baselines)
            else:
                comparison = compare_runs(*pairs[0], asked.baselines)
        print()
        print(write_comparison(comparison, folder))
        print(f"written to {escape_control_characters(str(folder))}/: comparison.html, comparison.md, comparison.json")
        if asked.assert_equal and (difference := first_difference_of(comparison)) is not None:
            print(f"not equal: {escape_control_characters(difference)}", file=sys.stderr)
            return 1
        return 0
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except RunError as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: everything that was started has ended", file=sys.stderr)
        return 130


def parse() -> tuple[argparse.Namespace, Settings]:
    """What to compare, and the settings to train with.

    Raises:
        UserError: an unknown flag, a wrong value, or one run where two are needed.
    """
    parser = settings_parser(__doc__)
    own = parser.add_argument_group("comparison")
    own.add_argument("runs", nargs="*", metavar="RUN", help="folders of two finished runs; without them both are made")
    own.add_argument("--nproc_per_node", type=int, default=2, help="processes that train together")
    own.add_argument(
        "--seeds", type=int, help="seeds to train with, counted up from --seed; by default 1, or 3 to ablate"
    )
    own.add_argument("--assert_equal", action="store_true", help="exit 1 unless the runs are equal to the bit")
    own.add_argument(
        "--no_baselines",
        dest="baselines",
        action="store_false",
        help="do not train the baselines (majority class, TF-IDF with logistic regression) that the report shows",
    )
    own.add_argument("--ablate", action="store_true", help="measure what the usual scripts' silent differences do")
    values = parser.values(sys.argv[1:])
    asked = argparse.Namespace(**{name: values.pop(name) for name in OWN})
    if len(asked.runs) not in (0, 2):
        raise UserError(f"{len(asked.runs)} run folder(s) given: name two, or none to train both")
    for name in ("nproc_per_node", "seeds"):
        if getattr(asked, name) is not None and getattr(asked, name) < 1:
            raise UserError(f"--{name} {shorten(str(getattr(asked, name)))}: must be 1 or more")
    if (values.get("seed") or 0) + (asked.seeds or 1) - 1 > LARGEST_COUNT:
        raise UserError(f"--seeds {shorten(str(asked.seeds))}: the last seed must be at most {LARGEST_COUNT}")
    if asked.ablate and (asked.runs or asked.assert_equal):
        raise UserError("--ablate trains runs of its own: leave the folders and --assert_equal out")
    return asked, Settings(**values)


def ablate_recipe(settings: Settings, ranks: int, seeds: int) -> int:
    """Trains with each silent difference in turn; prints and writes the table.

    Raises:
        UserError: a mistake in data, batch, model or folder.
    """
    from app.distributed.environment import check_environment
    from app.experiments.ablation import ablate, as_markdown, check_batches
    from app.training.prepare import read_and_split

    check_environment()
    _, split, _ = read_and_split(settings, ranks)
    check_batches(settings, len(split.train), ranks)
    folder = create_folder(settings.output_dir, RUNS / "ablations")
    ablation = ablate(settings, ranks, seeds)
    write_json(folder / "ablation.json", ablation)
    write_text(folder / "ablation.md", as_markdown(ablation))
    print(f"\n{as_markdown(ablation)}")
    print(f"written to {escape_control_characters(str(folder))}/: ablation.md, ablation.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
