"""Fault injection: kill ranks of real torchrun jobs with SIGKILL, at random moments, on both training paths.

    python -m app.experiments.fault_injection --kills 100 --seed 0 --csv reviews.csv

Each job runs under plain `torchrun --max-restarts=3`, with a random strategy, and loses one to three ranks: at
start-up, in a step, while a checkpoint is written, in an evaluation, right before the exit, or at any time. Without
intervention, it must end with status 0 and with the weights, predictions, steps and evaluations of an uninterrupted job
of the same path and architecture with `ddp`. One line is printed per job, and totals in the last line. The exit status
is 1 if any job differs.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path

import psutil

from ..cli import OneLineParser
from ..common.errors import UserError
from ..distributed.launcher import TorchrunJob
from ..program import run_program
from ..runs.hashes import DIGITS, hash_results
from ..runs.schema import MODEL, MODEL_FOLDER
from .fault_moments import MOMENTS, Moment, RunFiles
from .fault_subjects import MODELS, RESTARTS, STRATEGIES, Subject, build_subjects

TIME_LIMIT = 300.0  # seconds; a job that takes longer is considered to hang
LINE = "{:>3}  {:<11}  {:<5}  {:<8}  {:<80}  {:>11}  {:<16}  {:>7}  {:>7}  {}"
HEADER = [
    "job",
    "path",
    "model",
    "strategy",
    "killed (rank)",
    "attempts",
    "resumed at step",
    "seconds",
    "restart",
    "identical",
]


def main() -> int:
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="fault-injection-") as temporary:
        return inject_faults(arguments, Path(temporary))


def parse() -> argparse.Namespace:
    """Parse the command line.

    Raises:
        UserError: an unknown flag or an invalid value.
    """
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="total number of ranks to kill (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the killed ranks and the moments (default: 0)")
    parser.add_argument("--ranks", type=int, default=2, help="processes per job (default: 2)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="architectures (default: all)")
    parser.add_argument("--csv", type=Path, help="reviews to train on (default: the same as for a training run)")
    parser.add_argument("--folder", type=Path, help="keep runs and logs here (default: delete them)")
    arguments = parser.parse_args()
    for name in ("kills", "ranks"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name} {getattr(arguments, name)}: must be 1 or more")
    return arguments


@dataclass
class Outcome:
    """How a job ended.

    Attributes:
        log: the file with the job's standard output and standard error.
        problem: what is wrong with the result, or None.
        kills: the moment and rank of each kill.
        restart_seconds: for each kill, the seconds until the new rank 0 exists.
        seconds: the duration of the job.
    """

    log: Path
    problem: str | None = None
    kills: list[str] = field(default_factory=list)
    restart_seconds: list[float] = field(default_factory=list)
    seconds: float = 0.0


def inject_faults(arguments: argparse.Namespace, folder: Path) -> int:
    """Run jobs of all subjects in turn until enough ranks have been killed; return the exit status.

    Args:
        arguments: from `parse`.
        folder: for runs and logs, unless `--folder` names another one.

    Raises:
        UserError: a mistake in the CSV.
    """
    if arguments.folder is not None:
        folder = arguments.folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
    subjects = build_subjects(arguments.models, arguments.csv, arguments.ranks, folder=folder)
    uninterrupted: list[dict[str, str]] = []
    seconds: list[float] = []
    for subject in subjects:
        run_folder = folder / f"uninterrupted-{subject.path_name}-{subject.model_name}"
        outcome = run_job(subject, run_folder)
        if outcome.problem is not None:
            print(outcome.log.read_text(), file=sys.stderr)
            print(f"{subject.path_name} {subject.model_name}, uninterrupted: {outcome.problem}", file=sys.stderr)
            return 1
        uninterrupted.append(hash_results(run_folder))
        seconds.append(outcome.seconds)
        weights = uninterrupted[-1][f"{MODEL_FOLDER}/{MODEL}"][:DIGITS]
        print(f"{subject.path_name} {subject.model_name}: {outcome.seconds:.0f} s uninterrupted, weights {weights}")

    print(LINE.format(*HEADER), flush=True)
    rng = random.Random(arguments.seed)
    killed, number = 0, 0
    verdicts: list[list[bool]] = [[] for _ in subjects]
    for i in cycle(range(len(subjects))):
        if killed >= arguments.kills:
            break
        number += 1
        kills = min(rng.randint(1, RESTARTS), arguments.kills - killed)
        subject = replace(subjects[i], strategy=rng.choice(STRATEGIES))  # all have the bits of `ddp`
        outcome = run_job(subject, folder / f"job-{number}", kills, rng=rng, seconds=seconds[i])
        outcome.problem = outcome.problem or find_difference(folder / f"job-{number}", uninterrupted[i])
        killed += len(outcome.kills)
        verdicts[i].append(outcome.problem is None)
        print_outcome(number, subject, outcome)
    good = sum(map(sum, verdicts))
    totals = ", ".join(
        f"{subject.path_name} {subject.model_name} {sum(equal)}/{len(equal)}"
        for subject, equal in zip(subjects, verdicts, strict=True)
    )
    equal = f"all {number}" if good == number else f"{good} of {number}"
    print(f"{killed} kills in {number} jobs: {equal} are bitwise identical to the uninterrupted ones ({totals})")
    return 0 if good == number else 1


def run_job(
    subject: Subject, folder: Path, kills: int = 0, *, rng: random.Random | None = None, seconds: float = 0.0
) -> Outcome:
    """Run one job and kill ranks in it.

    Args:
        subject: the path and the model to train.
        folder: the run folder.
        kills: how many times to kill a rank; fewer if the job ends earlier.
        rng: draws moments and ranks.
        seconds: the duration of an uninterrupted job.
    """
    started = time.monotonic()
    files = RunFiles(folder)
    with subject.job(folder) as job:
        outcome = Outcome(folder.with_suffix(".log"))
        for _ in range(kills if rng else 0):
            assert rng is not None
            draw, rank = rng.choice(MOMENTS), rng.randrange(subject.ranks)
            target = wait_for_rank(job, rank, len(outcome.kills), files=files)
            if target is not None and kill(target, job, files, moment=draw(rng, seconds)):
                outcome.kills.append(f"{draw.__name__.replace('_', ' ')} ({rank})")
                killed = time.monotonic()
                if wait_for_rank(job, 0, len(outcome.kills), files=files) is not None:
                    outcome.restart_seconds.append(time.monotonic() - killed)
        outcome.problem = wait_for_end(job)
    outcome.seconds = time.monotonic() - started
    return outcome


def wait_for_rank(job: TorchrunJob, rank: int, restarts: int, *, files: RunFiles) -> psutil.Process | None:
    """Return the process of a rank after so many restarts as soon as it exists, or None if the job ends first."""
    process = job.wait_until(lambda: job.find_rank(rank, restarts))
    if process is not None:
        files.ranks_restarted()
    return process


def kill(target: psutil.Process, job: TorchrunJob, files: RunFiles, *, moment: Moment) -> bool:
    """Wait for the moment and kill the rank; return False if the rank ended before."""
    while job.running and target.is_running():
        if moment.condition(files):
            time.sleep(moment.delay)
            with suppress(psutil.Error):
                if target.status() == psutil.STATUS_ZOMBIE:
                    return False
                target.suspend()  # so that the moment cannot pass between the check and the kill
                if moment.condition(files):
                    target.kill()
                    return True
                target.resume()
        time.sleep(0.002)  # a checkpoint may be in its staging directory for a few milliseconds only
    return False


def wait_for_end(job: TorchrunJob) -> str | None:
    """Return what is wrong with the way the job ended, or None."""
    try:
        status = job.wait(TIME_LIMIT)
    except TimeoutError:
        return f"took more than {TIME_LIMIT:.0f} s"
    leftovers = job.kill_leftovers()
    if status != 0:
        return f"status {status}"
    return f"{len(leftovers)} processes left: {'; '.join(leftovers)}" if leftovers else None


def find_difference(folder: Path, uninterrupted: dict[str, str]) -> str | None:
    """Return what differs from the hashes of the uninterrupted run, or None."""
    try:
        hashes = hash_results(folder)
    except (OSError, ValueError) as problem:
        return f"incomplete run: {problem}"
    differing = [name for name in uninterrupted if hashes[name] != uninterrupted[name]]
    return f"{', '.join(differing)} differ" if differing else None


def print_outcome(number: int, subject: Subject, outcome: Outcome) -> None:
    """Print the job's line of the table, and its log if anything is wrong."""
    log = outcome.log.read_text()
    cells = (
        *(number, subject.path_name, subject.model_name, subject.strategy),
        ", ".join(outcome.kills) or "ended before it could be killed",
        len(outcome.kills) + 1,
        ", ".join(re.findall(r"resumed from .*\(step (\d+)\)", log)) or "0",
        f"{outcome.seconds:.1f}",
        f"{max(outcome.restart_seconds, default=0):.1f}",
        outcome.problem or "yes",
    )
    print(LINE.format(*cells), flush=True)
    if outcome.problem is not None:
        print(log, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_program(main))
