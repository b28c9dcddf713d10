"""Fault injection: kill ranks of real torchrun jobs with SIGKILL, at random moments, on both training paths.

    python -m app.experiments.faults --kills 100 --seed 0 --csv reviews.csv

Each job runs under plain `torchrun --max-restarts=3`, on one of the paths in turn and with a random strategy, and loses
one to three ranks: while a checkpoint is written, right before the exit, or at any time, often in an evaluation.
Without intervention, it must end with status 0 and with the weights, predictions, steps and evaluations of an
uninterrupted job of ddp_loop with `ddp`. One line is printed per job, and totals in the last line. The first job that
fails or differs ends the program with exit status 1, and its files are kept.
"""

from __future__ import annotations

import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from ..cli import OneLineParser, count
from ..common.errors import RunError
from ..common.files import check_exists
from ..common.paths import PACKAGE
from ..distributed.launcher import TorchrunJob
from ..jobs import PATHS
from ..program import run_program
from ..runs.hashes import DIGITS, hash_run
from ..runs.schema import CHECKPOINTS, METRICS, MODEL_FOLDER, PREDICTIONS
from ..settings import STRATEGIES, Settings
from .same_bits import Cell, build_job, train_cell, wait_for_success, with_strategy

MAX_STEPS, SAVE_STEPS, RESTARTS = 36, 5, 3
SETTINGS: dict[str, Any] = {
    **{"model": "tiny-bert", "max_steps": MAX_STEPS, "dropout": 0.1, "max_length": 32, "threads": 1, "use_cpu": True},
    **{"save_strategy": "steps", "save_steps": SAVE_STEPS, "load_best_model_at_end": True, "validation_size": 0.1},
    **{"eval_strategy": "steps", "eval_steps": 6, "disable_tqdm": True},
    "eval_batch_size": 4,  # small batches make evaluations so long that many kills are in them
}


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--kills", type=count, default=50, metavar="N", help="total number of ranks to kill")
    parser.add_argument("--seed", type=int, default=0, help="seed of the killed ranks and the moments")
    parser.add_argument("--ranks", type=count, default=2, metavar="N", help="processes per job")
    parser.add_argument("--csv", help="reviews to train on (default: the same as for a training run)")
    arguments = parser.parse_args()
    settings = Settings(csv=arguments.csv, **SETTINGS)
    check_exists(settings.csv_path)
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    settings = replace(settings, cache_dir=str(folder / "cache"))
    inject_faults(settings, arguments.ranks, arguments.kills, folder=folder, rng=random.Random(arguments.seed))
    shutil.rmtree(folder)  # not after a failure
    return 0


def inject_faults(settings: Settings, ranks: int, kills: int, *, folder: Path, rng: random.Random) -> None:
    """Run jobs of both paths in turn until enough ranks have been killed.

    Raises:
        RunError: a job failed, or its results differ from those of an uninterrupted one.
    """
    uninterrupted, start = Cell("ddp_loop", ranks, settings.strategy), time.monotonic()
    train_cell(uninterrupted, settings, folder, rng=rng)
    reference, usual_seconds = folder / uninterrupted.folder_name, time.monotonic() - start
    expected, number, killed = hash_run(reference), 0, 0
    print(f"uninterrupted: {usual_seconds:.0f} s, hash {expected[:DIGITS]}", flush=True)
    while killed < kills:
        number += 1
        path_name, strategy = PATHS[number % 2], rng.choice(STRATEGIES)  # all have the bits of `ddp`
        run = folder / f"{number}-{path_name}-{strategy}"
        log, moments = Path(f"{run}.log"), list[str]()
        job_settings = replace(with_strategy(settings, strategy), output_dir=str(run))
        with build_job(path_name, ranks, job_settings, log=log, max_restarts=RESTARTS) as job:
            for _ in range(min(rng.randint(1, RESTARTS), kills - killed)):
                target = job.wait_until(partial(job.find_rank, rng.randrange(ranks), len(moments)))
                moment, is_now, delay = draw_moment(run, rng, usual_seconds)
                if target is not None and kill(target, job, is_now, delay=delay):
                    moments.append(moment)
            wait_for_success(job)
        if hash_run(run) != expected:
            command = f"python -m {PACKAGE}.compare {reference} {run} --assert_equal"
            raise RunError(f"{run.name} is not bitwise identical: {command}")
        killed += len(moments)
        resumed = ", ".join(re.findall(r"resumed from .*step ([0-9]+)", log.read_text())) or "none"
        print(f"{run.name}: killed {', '.join(moments) or 'nowhere'}; resumed at step {resumed}; identical", flush=True)
    print(f"{killed} kills in {number} jobs: all {number} are bitwise identical to the uninterrupted one")


def draw_moment(run: Path, rng: random.Random, usual_seconds: float) -> tuple[str, Callable[[], bool], float]:
    """Return the name of a moment, a condition, and a delay in seconds.

    A rank is killed so long after the condition has become true, if it is still true then.
    """
    started = time.time()  # what has been written before is not the work of the current processes
    saved = [int(folder.name.partition("-")[2]) for folder in (run / CHECKPOINTS).glob("checkpoint-*")]
    step = min(max(saved, default=0) + SAVE_STEPS * rng.randint(1, 3), MAX_STEPS)
    staging = run / CHECKPOINTS / f".checkpoint-{step}.tmp"  # it is renamed when the checkpoint is complete
    last = run / rng.choice([METRICS.name, PREDICTIONS, f".{MODEL_FOLDER}.tmp"])
    moments: list[tuple[str, Callable[[], bool], float]] = [
        (f"while checkpoint {step} is written", partial(is_written, staging, started), rng.uniform(0, 0.03)),
        ("before the exit", partial(is_written, last, started), rng.uniform(0, 0.03)),
        ("at any time", lambda: True, rng.uniform(0, usual_seconds)),
    ]
    return rng.choice(moments)


def is_written(path: Path, since: float) -> bool:
    """Return whether a file or a folder has been written since then."""
    with suppress(OSError):
        return path.stat().st_mtime > since
    return False


def kill(target: psutil.Process, job: TorchrunJob, condition: Callable[[], bool], *, delay: float) -> bool:
    """Wait for the moment and kill the rank; return False if the rank ended before."""
    while job.torchrun.poll() is None and target.is_running():
        if condition():
            time.sleep(delay)
            with suppress(psutil.Error):
                if target.status() == psutil.STATUS_ZOMBIE:
                    return False
                target.suspend()  # so that the moment cannot pass between the check and the kill
                if condition():
                    target.kill()
                    return True
                target.resume()
        time.sleep(0.002)  # a checkpoint may be in its staging directory for a few milliseconds only
    return False


if __name__ == "__main__":
    sys.exit(run_program(main))
