"""Kills ranks of real torchrun jobs with SIGKILL, at random moments, on both roads.

Each job runs under plain `torchrun --max-restarts=3` and is hit one to three times: while it starts, in a step, while a
checkpoint is written, while it evaluates, right before it exits, or at any time. It must end with status 0, without a
helping hand, with the weights, predictions and steps of a job that nobody disturbed. A line a job; the exit status is 1
where one did not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

PROJECT = Path(__file__).resolve().parents[1]
ROADS = ("ddp_loop", "trainer_run")
RESTARTS, SAVE_STEPS, EVAL_STEPS, STEPS = 3, 5, 10, 40
FLAGS = [
    *("--max_steps", STEPS, "--save_strategy", "steps", "--save_steps", SAVE_STEPS, "--dropout", 0.1),
    *("--eval_strategy", "steps", "--eval_steps", EVAL_STEPS, "--validation_size", 0.1, "--load_best_model_at_end"),
    *("--max_length", 64, "--disable_tqdm", "--use_cpu"),
]
MARK = "TWO_ROADS_TORTURE"
LIMIT = 300.0  # seconds; a job that takes longer hangs


class Job:
    """A torchrun job whose ranks can be watched from outside and hit."""

    def __init__(self, road: str, folder: Path, ranks: int, flags: list[str]) -> None:
        self.road, self.folder, self.log = road, folder, folder.with_suffix(".log")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command = [*torchrun, f"--max-restarts={RESTARTS}", "-m", f"app.{road}", "--output_dir", str(folder), *flags]
        environment = os.environ | {"PYTHONPATH": str(PROJECT), MARK: str(folder)}
        with self.log.open("w") as log:
            self.torchrun = subprocess.Popen(
                command, cwd=PROJECT, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def rank(self, rank: int, generation: int) -> psutil.Process | None:
        """The process that is this rank after so many restarts, as soon as there is one; None where the job ended."""
        while self.torchrun.poll() is None:
            with suppress(psutil.Error):
                for process in psutil.Process(self.torchrun.pid).children():
                    environment = process.environ()
                    place = environment.get("RANK"), environment.get("TORCHELASTIC_RESTART_COUNT")
                    if place == (str(rank), str(generation)):
                        return process
            time.sleep(0.02)
        return None

    def last_line(self, log: str) -> int:
        """The step of the log's last line, 0 where there is none."""
        with suppress(OSError, IndexError, ValueError):
            return int(json.loads((self.folder / log).read_text().splitlines()[-1])["step"])
        return 0

    def end(self) -> list[int]:
        """Ends whatever is left of the job once it should be over; returns the ids of what was left."""
        _, alive = psutil.wait_procs(self._processes(), timeout=0 if self.torchrun.poll() is None else 10)
        for process in alive:
            with suppress(psutil.Error):
                process.kill()
        self.torchrun.wait()
        return [process.pid for process in alive]

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == str(self.folder):
                    found.append(process)
        return found


# ---- where to hit: each draws a moment, as a condition on the job and a delay behind it ------------------------------


Moment = tuple[Callable[[Job], bool], float]


def start_up(chance: random.Random, seconds: float) -> Moment:
    return lambda job: True, chance.uniform(0, 0.6 * seconds)


def in_a_step(chance: random.Random, seconds: float) -> Moment:
    step = chance.randrange(1, STEPS)
    return lambda job: job.last_line("steps.jsonl") >= step, chance.uniform(0, 0.5)


def in_a_save(chance: random.Random, seconds: float) -> Moment:
    step = chance.randrange(1, STEPS)
    return (
        lambda job: job.last_line("steps.jsonl") >= step and (job.folder / "checkpoints" / ".writing").exists(),
        chance.uniform(0, 0.1),
    )


def in_an_evaluation(chance: random.Random, seconds: float) -> Moment:
    step = EVAL_STEPS * chance.randrange(1, STEPS // EVAL_STEPS + 1)
    return (
        lambda job: job.last_line("steps.jsonl") >= step > job.last_line("evaluations.jsonl"),
        chance.uniform(0, 0.1),
    )


def before_the_exit(chance: random.Random, seconds: float) -> Moment:
    file = chance.choice(["metrics.json", "predictions.csv", ".model.tmp"])
    return lambda job: (job.folder / file).exists(), chance.uniform(0, 0.05)


def at_any_time(chance: random.Random, seconds: float) -> Moment:
    return lambda job: True, chance.uniform(0, seconds)


MOMENTS = (start_up, in_a_step, in_a_save, in_an_evaluation, before_the_exit, at_any_time)


def hit(victim: psutil.Process, job: Job, moment: Moment) -> bool:
    """Waits for the moment and kills the rank; False where it has ended by itself before."""
    condition, delay = moment
    while victim.is_running() and not condition(job):
        time.sleep(0.002)
    time.sleep(delay)
    with suppress(psutil.Error):
        if victim.status() != psutil.STATUS_ZOMBIE:
            victim.kill()
            return True
    return False


# ---- what must be equal ----------------------------------------------------------------------------------------------


def result_of(folder: Path) -> dict[str, str]:
    """Hashes of all that must not depend on whether a run was disturbed."""
    files = {name: (folder / name).read_bytes() for name in ("model/model.safetensors", "predictions.csv")}
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    untimed = [{name: value for name, value in step.items() if name != "seconds"} for step in steps]
    files["steps.jsonl"] = json.dumps(untimed).encode()
    files["evaluations.jsonl"] = (folder / "evaluations.jsonl").read_bytes()
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def wait(job: Job) -> str | None:
    """What is wrong with the way the job ended, or None."""
    deadline = time.monotonic() + LIMIT
    while job.torchrun.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    hung = job.torchrun.poll() is None
    left = job.end()
    if hung:
        return f"took more than {LIMIT:.0f} s"
    if job.torchrun.returncode != 0:
        return f"status {job.torchrun.returncode}"
    return f"left processes {left}" if left else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="how many ranks to kill in all (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="decides roads, ranks and moments (default: 0)")
    parser.add_argument("--ranks", type=int, default=2, help="processes of a job (default: 2)")
    parser.add_argument("--csv", help="reviews to train on; by default what a run takes")
    parser.add_argument("--folder", type=Path, help="keep runs and logs here; by default they are deleted")
    arguments = parser.parse_args()
    flags = [str(flag) for flag in FLAGS] + (["--csv", str(Path(arguments.csv).resolve())] if arguments.csv else [])
    if arguments.folder is not None:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        return torture(arguments.kills, arguments.seed, arguments.ranks, flags, arguments.folder.resolve())
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        return torture(arguments.kills, arguments.seed, arguments.ranks, flags, Path(folder))


def torture(kills: int, seed: int, ranks: int, flags: list[str], folder: Path) -> int:
    chance = random.Random(seed)
    undisturbed: dict[str, dict[str, str]] = {}
    seconds: dict[str, float] = {}
    flags = [*flags, "--cache_dir", str(folder / "cache")]
    for road in ROADS:
        started = time.monotonic()
        job = Job(road, folder / f"undisturbed-{road}", ranks, flags)
        problem = wait(job)
        if problem is not None:
            print(f"{road}, undisturbed: {problem}\n{job.log.read_text()}", file=sys.stderr)
            return 1
        undisturbed[road], seconds[road] = result_of(job.folder), time.monotonic() - started
        print(f"{road}: {seconds[road]:.0f} s undisturbed, weights {undisturbed[road]['model/model.safetensors'][:16]}")

    head = f"{'job':>3}  {'path':<11}  {'hit where (rank)':<62}  {'generations':>11}  {'resumed at step':<16}"
    print(f"{head}  {'seconds':>7}  {'restart':>7}  hash equal?", flush=True)
    done, number, missed = 0, 0, 0
    while done < kills:
        number += 1
        road = ROADS[number % 2]
        started = time.monotonic()
        job = Job(road, folder / f"job-{number}", ranks, flags)
        hits: list[str] = []
        restarts: list[float] = []  # seconds from each death to the processes that take over
        for _ in range(min(chance.randint(1, RESTARTS), kills - done)):
            where, rank = chance.choice(MOMENTS), chance.randrange(ranks)
            victim = job.rank(rank, generation=len(hits))
            if victim is not None and hit(victim, job, where(chance, seconds[road])):
                hits.append(f"{where.__name__} ({rank})")
                died = time.monotonic()
                if job.rank(0, generation=len(hits)) is not None:
                    restarts.append(time.monotonic() - died)
        done += len(hits)
        problem = wait(job)
        took = time.monotonic() - started
        log = job.log.read_text()
        if problem is None:
            differing = [name for name, its in result_of(job.folder).items() if its != undisturbed[road][name]]
            problem = f"{', '.join(differing)} differ" if differing else None
        missed += problem is not None
        resumed = ", ".join(re.findall(r"resumed from .*\(step (\d+)\)", log)) or "0"
        where_hit = ", ".join(hits).replace("_", " ") or "ended before it was hit"
        restart = f"{max(restarts, default=0):7.1f}"
        line = f"{number:>3}  {road:<11}  {where_hit:<62}  {len(restarts) + 1:>11}  {resumed:<16}"
        print(f"{line}  {took:7.1f}  {restart}  {problem or 'yes'}", flush=True)
        if problem is not None:
            print(log, file=sys.stderr)
    print(f"{done} kills in {number} jobs: {number - missed} of {number} ended as if nothing had happened")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
