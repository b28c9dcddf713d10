"""Train both paths as child jobs."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from pathlib import Path

from app.cli import as_flags
from app.errors import RunError
from app.runs.folder import create_folder
from app.runs.reader import Run, read_run
from app.runs.schema import RUNS
from app.settings import Settings

PATHS = ("ddp_loop", "trainer_run")


def train_pairs(settings: Settings, nproc_per_node: int, seeds: int) -> tuple[Path, list[tuple[Run, Run]]]:
    """Trains on both roads, with each seed in turn; the folder that holds it all, and the pairs of runs.

    Raises:
        UserError: a mistake in data, batch or model: found here, it is one line and not one from each process.
        RunError: a road failed.
    """
    from app.model.hub import resolve_commit
    from app.model.load import load_config
    from app.training.prepare import read_and_split

    read_and_split(settings, nproc_per_node)
    settings = dataclasses.replace(settings, revision=resolve_commit(settings))  # every run starts from the same commit
    load_config(settings, settings.revision)
    folder = create_folder(settings.output_dir, RUNS / "comparisons")
    pairs = []
    for seed in range(settings.seed, settings.seed + seeds):
        place = folder if seeds == 1 else folder / f"seed-{seed}"
        pairs.append([train(road, dataclasses.replace(settings, seed=seed), nproc_per_node, place) for road in PATHS])
    return folder, [(a, b) for a, b in pairs]


def train(road: str, settings: Settings, nproc_per_node: int, folder: Path) -> Run:
    """One road in a torchrun job of its own.

    Raises:
        RunError: it failed.
    """
    from app.distributed.launcher import torchrun

    print(f"\n--- {road}, seed {settings.seed} ---", flush=True)
    place = folder / road
    flags = as_flags(dataclasses.replace(settings, output_dir=str(place)))
    status = torchrun(f"app.{road}", flags, nproc_per_node, settings.threads)
    if status != 0:
        with suppress(OSError):
            folder.rmdir()  # only where it is empty
        raise RunError(f"{road} failed" + (f"; what it left is in {place}" if place.exists() else ""))
    return read_run(place)
