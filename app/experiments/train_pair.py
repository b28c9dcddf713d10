"""Train both paths as child jobs and read their results back."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..common.errors import RunError
from ..common.paths import PACKAGE
from ..jobs import run_job
from ..runs.folder import create_folder
from ..runs.reader import Run, read_run
from ..runs.schema import RUNS
from ..settings import Settings

PATHS = ("ddp_loop", "trainer_run")


def train_pairs(settings: Settings, nproc_per_node: int, seeds: int) -> tuple[Path, list[tuple[Run, Run]]]:
    """Train both paths with each of several seeds, one run after the other.

    Args:
        settings: the settings of all runs; `seed` is the first seed.
        nproc_per_node: number of processes of each run.
        seeds: number of seeds.

    Returns:
        The folder that holds all runs, and a pair of runs for each seed.

    Raises:
        UserError: a mistake in the data, the batch size or the model. It is found before any job starts.
        RunError: a path failed.
    """
    # Imported late: with two finished runs, `compare` needs none of these.
    from ..model.hub import resolve_commit
    from ..model.load import load_config
    from ..training.build import read_and_split

    read_and_split(settings, nproc_per_node)
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
