"""Fault injection: kill ranks of real torchrun jobs with SIGKILL, at random moments, on both training paths.

    python -m app.experiments.faults --kills 100 --seed 0 --csv reviews.csv

Each job runs under plain `torchrun --max-restarts=3`, on one of the paths in turn and with a random strategy, and loses
one to three ranks: while a checkpoint is written, in an evaluation, right before the exit, or at any time. Without
intervention, it must end with status 0 and with the weights, predictions, steps and evaluations of an uninterrupted job
of ddp_loop with `ddp`. One line is printed per job, and totals in the last line. The exit status is 1 if any job
differs.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count as numbers
from pathlib import Path

import psutil

from ..cli import OneLineParser, count
from ..common.files import check_exists
from ..common.paths import PACKAGE
from ..distributed.launcher import TorchrunJob, torchrun_command
from ..jobs import PATHS
from ..program import run_program
from ..runs.hashes import DIGITS, hash_results
from ..runs.schema import CHECKPOINTS, EVALUATIONS, METRICS, MODEL, MODEL_FOLDER, PREDICTIONS, STEPS
from ..settings import STRATEGIES, Settings

# Steps 6 to 24 have an evaluation and no checkpoint, 5 to 25 a checkpoint and no evaluation, 30 and 36 have both.
MAX_STEPS, SAVE_STEPS, EVAL_STEPS, RESTARTS = 36, 5, 6, 3
FLAGS = [
    *("--model", "tiny-bert", "--max_steps", MAX_STEPS, "--dropout", 0.1, "--max_length", 32, "--threads", 1),
    *("--save_strategy", "steps", "--save_steps", SAVE_STEPS, "--load_best_model_at_end", "--validation_size", 0.1),
    *("--eval_strategy", "steps", "--eval_steps", EVAL_STEPS, "--disable_tqdm", "--use_cpu"),
    *("--eval_batch_size", 8),  # small batches make evaluations long enough to kill a rank in them
]
MOMENTS = ("in a save", "in an evaluation", "before the exit", "at any time")
TIME_LIMIT = 300.0  # seconds; a job that takes longer is considered to hang
LINE = "{:>3}  {:<11}  {:<8}  {:<66}  {:<16}  {:>7}  {}"


@dataclass
class Job:
    """A training run under torchrun, which loses ranks.

    Attributes:
        since: when its current processes were started; what a file held before that is not their work.
        kills: the moment and rank of each kill.
        problem: the reason why the result is not correct; None if it is.
    """

    path_name: str
    strategy: str
    folder: Path
    since: float = 0.0
    kills: list[str] = field(default_factory=list)
    problem: str | None = None
    seconds: float = 0.0

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    def is_written(self, path: Path) -> bool:
        """Return whether the current processes have written a file or a folder."""
        with suppress(OSError):
            return path.stat().st_mtime > self.since
        return False

    def last_step(self, log: str) -> int:
        """Return the step in the last line of a log, or 0 if there is none since the restart."""
        with suppress(OSError, IndexError, ValueError):  # a line that is being written
            if self.is_written(self.folder / log):
                return int(json.loads((self.folder / log).read_text().splitlines()[-1])["step"])
        return 0

    def is_saving(self) -> bool:
        """Return whether a checkpoint is in its staging folder, which is hidden."""
        with suppress(OSError):  # the folder may disappear while it is listed
            return any(map(self.is_written, (self.folder / CHECKPOINTS).glob(".*")))
        return False

    def is_evaluating(self) -> bool:
        """Return whether an evaluation is due that has no line yet.

        Steps that also save a checkpoint are left out: it may be written instead.
        """
        step = self.last_step(STEPS.name)
        is_due = step % EVAL_STEPS == 0 and step % SAVE_STEPS != 0 and step != MAX_STEPS
        return is_due and step > self.last_step(EVALUATIONS.name)


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--kills", type=count, default=50, metavar="N", help="total number of ranks to kill")
    parser.add_argument("--seed", type=int, default=0, help="seed of the killed ranks and the moments")
    parser.add_argument("--ranks", type=count, default=2, metavar="N", help="processes per job")
    parser.add_argument("--csv", type=Path, help="reviews to train on (default: the same as for a training run)")
    parser.add_argument("--folder", type=Path, help="keep runs and logs here (default: delete them)")
    arguments = parser.parse_args()
    settings = Settings(csv=str(arguments.csv.resolve()) if arguments.csv else None)
    check_exists(settings.csv_path)
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        folder = arguments.folder.resolve() if arguments.folder else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        flags = [*map(str, FLAGS), f"--csv={settings.csv_path}", f"--cache_dir={folder / 'cache'}"]
        return inject_faults(flags, arguments.ranks, arguments.kills, folder=folder, rng=random.Random(arguments.seed))


def inject_faults(flags: list[str], ranks: int, kills: int, *, folder: Path, rng: random.Random) -> int:
    """Run jobs of both paths in turn until enough ranks have been killed; return the exit status."""
    first = Job("ddp_loop", "ddp", folder / "uninterrupted")
    run(first, flags, ranks, moments=[], rng=rng)
    if first.problem is not None:
        print(f"{first.log.read_text()}\nuninterrupted: {first.problem}", file=sys.stderr)
        return 1
    expected = hash_results(first.folder)
    print(f"{first.seconds:.0f} s uninterrupted, weights {expected[f'{MODEL_FOLDER}/{MODEL}'][:DIGITS]}")
    print(
        LINE.format("job", "path", "strategy", "killed (rank)", "resumed at step", "seconds", "identical"), flush=True
    )
    killed, identical = 0, 0
    for number in numbers(1):
        job = Job(PATHS[number % 2], rng.choice(STRATEGIES), folder / f"job-{number}")  # all have the bits of `ddp`
        moments = rng.choices(MOMENTS, k=min(rng.randint(1, RESTARTS), kills - killed))
        run(job, flags, ranks, moments=moments, rng=rng, usual_seconds=first.seconds)
        job.problem = job.problem or find_difference(job.folder, expected)
        killed, identical = killed + len(job.kills), identical + (job.problem is None)
        log = job.log.read_text()
        resumed = ", ".join(re.findall(r"resumed from .*\(step (\d+)\)", log)) or "0"
        kills_of_job = ", ".join(job.kills) or "ended before it could be killed"
        cells = (number, job.path_name, job.strategy, kills_of_job, resumed, f"{job.seconds:.1f}", job.problem or "yes")
        print(LINE.format(*cells), flush=True)
        if job.problem is not None:
            print(log, file=sys.stderr)
        if killed >= kills:
            break
    share = f"all {number}" if identical == number else f"{identical} of {number}"
    print(f"{killed} kills in {number} jobs: {share} are bitwise identical to the uninterrupted one")
    return 0 if identical == number else 1


def run(
    job: Job, flags: list[str], ranks: int, *, moments: list[str], rng: random.Random, usual_seconds: float = 0.0
) -> None:
    """Run a job to its end, and kill a rank at each of the moments; fewer if it ends earlier."""
    flags = [*flags, f"--strategy={job.strategy}", f"--output_dir={job.folder}"]
    torchrun_flags = ["--standalone", f"--max-restarts={RESTARTS}"]
    module = f"{PACKAGE}.{job.path_name}"
    command = torchrun_command(module, flags, nproc_per_node=ranks, torchrun_flags=torchrun_flags)
    started = time.monotonic()
    with TorchrunJob(command, environment={"HF_HUB_OFFLINE": "1"}, stdout=job.log, grace_seconds=0) as processes:
        for moment in moments:
            rank = rng.randrange(ranks)
            condition, delay = draw_moment(job, moment, rng, usual_seconds=usual_seconds)
            target = processes.wait_until(lambda rank=rank: processes.find_rank(rank, len(job.kills)))  # type: ignore[misc]
            job.since = time.time()
            if target is not None and kill(target, processes, condition, delay=delay):
                job.kills.append(f"{moment} ({rank})")
        try:
            status = processes.wait(TIME_LIMIT)
            job.problem = f"status {status}" if status else None
        except subprocess.TimeoutExpired:
            job.problem = f"took more than {TIME_LIMIT:.0f} s"
    job.seconds = time.monotonic() - started


def draw_moment(job: Job, moment: str, rng: random.Random, *, usual_seconds: float) -> tuple[Callable[[], bool], float]:
    """Return a condition, and a delay in seconds: kill so long after it has become true, if it is still true then."""
    step = rng.randrange(1, MAX_STEPS - SAVE_STEPS)
    last_file = job.folder / rng.choice([METRICS.name, PREDICTIONS, f".{MODEL_FOLDER}.tmp"])
    return {
        "in a save": (lambda: job.is_saving() and job.last_step(STEPS.name) >= step, rng.uniform(0, 0.03)),
        "in an evaluation": (lambda: job.is_evaluating() and job.last_step(STEPS.name) >= step, rng.uniform(0, 0.05)),
        "before the exit": (lambda: job.is_written(last_file), rng.uniform(0, 0.03)),
        "at any time": (lambda: True, rng.uniform(0, usual_seconds)),
    }[moment]


def kill(target: psutil.Process, job: TorchrunJob, condition: Callable[[], bool], *, delay: float) -> bool:
    """Wait for the moment and kill the rank; return False if the rank ended before."""
    while job.running and target.is_running():
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


def find_difference(folder: Path, uninterrupted: dict[str, str]) -> str | None:
    """Return the results that differ from the uninterrupted run, or None."""
    try:
        hashes = hash_results(folder)
    except (OSError, ValueError) as problem:
        return f"incomplete run: {problem}"
    differing = [name for name in uninterrupted if hashes[name] != uninterrupted[name]]
    return f"{', '.join(differing)} differ" if differing else None


if __name__ == "__main__":
    sys.exit(run_program(main))
