"""Fault injection: kill ranks of real torchrun jobs with SIGKILL, at random moments, on both training paths.

    python -m app.experiments.fault_injection --kills 100 --seed 0 --csv reviews.csv

Each job runs under plain `torchrun --max-restarts=3` and loses one to three ranks: at start-up, in a step, while a
checkpoint is written, in an evaluation, right before the exit, or at any time. It must end with status 0, without help,
and with the weights, predictions, steps and evaluations of an undisturbed job of the same path and architecture. One
line per job, and totals in the last line; the exit status is 1 if any job differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import psutil
from transformers import BartConfig, GPT2Config

from app.data.csv_table import read_reviews
from app.experiments.train_pair import PATHS
from app.model.tiny_bert import learn_tokenizer
from app.settings import REPOSITORY, Settings

MODELS = ("bert", "gpt2", "bart")
# Steps 6 to 24 have an evaluation and no checkpoint, 5 to 25 a checkpoint and no evaluation, 30 and 36 have both.
RESTARTS, SAVE_STEPS, EVAL_STEPS, STEPS = 3, 5, 6, 36
FLAGS = [
    *("--max_steps", STEPS, "--save_strategy", "steps", "--save_steps", SAVE_STEPS, "--dropout", 0.1),
    *("--eval_strategy", "steps", "--eval_steps", EVAL_STEPS, "--validation_size", 0.1, "--load_best_model_at_end"),
    *("--max_length", 32, "--threads", 1, "--disable_tqdm", "--use_cpu"),
    *("--eval_batch_size", 8),  # an evaluation that takes long enough to be hit
]
JOB_VARIABLE = "SAMEBITS_FAULT_INJECTION"
TIME_LIMIT = 300.0  # seconds; a job that takes longer hangs


def write_model(name: str, csv: Path | None, folder: Path) -> str:
    """The value of `--model` for an architecture: `tiny`, or a folder with a tiny config and a tokenizer.

    The folder has no weights, so they are drawn from the seed.
    """
    if name == "bert":
        return "tiny"
    settings = Settings(csv=str(csv) if csv else None)
    tokenizer = learn_tokenizer(read_reviews(settings.csv_path, settings.text_column, settings.label_column).texts)
    ids: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,  # in every row, where BART's classifier reads its sentence vector
    }
    if name == "gpt2":
        GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=2, **ids).save_pretrained(folder)
    else:
        layers: dict[str, Any] = {
            f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in SMALL_LAYERS.items()
        }
        BartConfig(
            d_model=32,
            max_position_embeddings=64,
            decoder_start_token_id=tokenizer.sep_token_id,
            tie_word_embeddings=True,
            **layers,
            **ids,
        ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


SMALL_LAYERS = {"layers": 1, "attention_heads": 2, "ffn_dim": 64}


class Job:
    """A torchrun job whose ranks can be observed from outside and killed."""

    def __init__(self, path_name: str, folder: Path, ranks: int, flags: list[str]) -> None:
        self.folder, self.log = folder, folder.with_suffix(".log")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command = [*torchrun, f"--max-restarts={RESTARTS}", "-m", f"app.{path_name}", "--output_dir", str(folder)]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", JOB_VARIABLE: str(folder)}
        with self.log.open("w") as log:
            self.torchrun = subprocess.Popen(
                [*command, *flags], cwd=REPOSITORY, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.logs_at_start: list[tuple[int, int] | None] = []

    def rank(self, rank: int, generation: int) -> psutil.Process | None:
        """The process of this rank after so many restarts, as soon as it exists; None if the job has ended."""
        while self.torchrun.poll() is None:
            with suppress(psutil.Error):
                for process in psutil.Process(self.torchrun.pid).children():
                    environment = process.environ()
                    place = environment.get("RANK"), environment.get("TORCHELASTIC_RESTART_COUNT")
                    if place == (str(rank), str(generation)):
                        self.logs_at_start = self._logs()
                        return process
            time.sleep(0.02)
        return None

    def trains(self) -> bool:
        """Whether the current generation of processes has opened the run: it has written a file there."""
        return self._logs() != self.logs_at_start

    def last_step(self, log: str) -> int:
        """The step in the log's last line; 0 without one."""
        with suppress(OSError, IndexError, ValueError):
            return int(json.loads((self.folder / log).read_text().splitlines()[-1])["step"])
        return 0

    def checkpoint_in_staging(self) -> int:
        """The step of the checkpoint that is being written; 0 if none is."""
        with suppress(OSError, StopIteration):  # the staging folder may vanish while it is listed
            name = next(self.folder.glob("checkpoints/.*/checkpoint-*")).name
            return int(name.removeprefix("checkpoint-"))
        return 0

    def end(self) -> list[int]:
        """Kill whatever is left of the job once it should have ended; return the process ids."""
        _, alive = psutil.wait_procs(self._processes(), timeout=0 if self.torchrun.poll() is None else 10)
        for process in alive:
            with suppress(psutil.Error):
                process.kill()
        self.torchrun.wait()
        return [process.pid for process in alive]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self.torchrun.poll() is None:  # this script was interrupted
            self.torchrun.kill()
        self.end()

    def _logs(self) -> list[tuple[int, int] | None]:
        found: list[tuple[int, int] | None] = []
        for name in ("settings.json", "steps.jsonl"):
            try:
                status = (self.folder / name).stat()
                found.append((status.st_ino, status.st_mtime_ns))
            except OSError:
                found.append(None)
        return found

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(JOB_VARIABLE) == str(self.folder):
                    found.append(process)
        return found


# ---- when to kill: each draws a moment, as a condition on the job and a delay after it -------------------------------


Moment = tuple[Callable[[Job], bool], float]


def at_start_up(chance: random.Random, seconds: float) -> Moment:
    return lambda job: True, chance.uniform(0, 0.6 * seconds)


def in_a_step(chance: random.Random, seconds: float) -> Moment:
    step = chance.randrange(1, STEPS)
    return lambda job: job.trains() and job.last_step("steps.jsonl") >= step, chance.uniform(0, 0.2)


def in_a_save(chance: random.Random, seconds: float) -> Moment:
    step = chance.randrange(1, STEPS)
    return lambda job: job.trains() and job.checkpoint_in_staging() >= step, chance.uniform(0, 0.03)


def in_the_save_of_an_evaluation(chance: random.Random, seconds: float) -> Moment:
    """While the checkpoint of a step is written that is also evaluated, before or after."""
    both = [step for step in range(1, STEPS + 1) if is_due(step, EVAL_STEPS) and is_due(step, SAVE_STEPS)]
    return lambda job: job.trains() and job.checkpoint_in_staging() in both, chance.uniform(0, 0.03)


def in_an_evaluation(chance: random.Random, seconds: float) -> Moment:
    """After a step of which only an evaluation is due: the step's line is written before it, the evaluation's after it,
    and nothing else happens in between, whichever of checkpoint and evaluation comes first at other steps."""
    first = chance.randrange(1, STEPS - SAVE_STEPS)

    def evaluates(job: Job) -> bool:
        step = job.last_step("steps.jsonl")
        due = is_due(step, EVAL_STEPS) and not is_due(step, SAVE_STEPS)
        return job.trains() and due and step >= first and step > job.last_step("evaluations.jsonl")

    return evaluates, chance.uniform(0, 0.05)


def before_the_exit(chance: random.Random, seconds: float) -> Moment:
    file = chance.choice(["metrics.json", "predictions.csv", ".model.tmp"])
    return lambda job: job.trains() and (job.folder / file).exists(), chance.uniform(0, 0.03)


def at_any_time(chance: random.Random, seconds: float) -> Moment:
    return lambda job: True, chance.uniform(0, seconds)


def is_due(step: int, every: int) -> bool:
    return step > 0 and (step % every == 0 or step == STEPS)


MOMENTS = (
    *(at_start_up, in_a_step, in_a_save, in_the_save_of_an_evaluation),
    *(in_an_evaluation, before_the_exit, at_any_time),
)


def kill(target: psutil.Process, job: Job, moment: Moment) -> bool:
    """Wait for the moment and kill the rank in it; False if the rank has ended before."""
    condition, delay = moment
    while job.torchrun.poll() is None and target.is_running():
        if condition(job):
            time.sleep(delay)
            with suppress(psutil.Error):
                if target.status() == psutil.STATUS_ZOMBIE:
                    return False
                target.suspend()  # so that the moment cannot pass between the check and the kill
                if condition(job):
                    target.kill()
                    return True
                target.resume()
        time.sleep(0.002)
    return False


# ---- what must be equal ----------------------------------------------------------------------------------------------


def result_of(folder: Path) -> dict[str, str]:
    """Hashes of everything that must not depend on whether a run was disturbed."""
    files = {name: (folder / name).read_bytes() for name in ("model/model.safetensors", "predictions.csv")}
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    untimed = [{name: value for name, value in step.items() if name != "seconds"} for step in steps]
    files["steps.jsonl"] = json.dumps(untimed).encode()
    files["evaluations.jsonl"] = (folder / "evaluations.jsonl").read_bytes()
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def differences(folder: Path, undisturbed: dict[str, str]) -> str | None:
    """What differs from the undisturbed run, or None."""
    try:
        result = result_of(folder)
    except (OSError, ValueError) as problem:
        return f"no complete run: {problem}"
    differing = [name for name in undisturbed if result[name] != undisturbed[name]]
    return f"{', '.join(differing)} differ" if differing else None


def wait(job: Job) -> str | None:
    """What is wrong with the way the job ended, or None."""
    deadline = time.monotonic() + TIME_LIMIT
    while job.torchrun.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    hung = job.torchrun.poll() is None
    left = job.end()
    if hung:
        return f"took more than {TIME_LIMIT:.0f} s"
    if job.torchrun.returncode != 0:
        return f"status {job.torchrun.returncode}"
    return f"left processes {left}" if left else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="how many ranks to kill in all (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="decides ranks and moments (default: 0)")
    parser.add_argument("--ranks", type=int, default=2, help="processes of a job (default: 2)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="architectures (default: all)")
    parser.add_argument("--csv", type=Path, help="reviews to train on; by default what a run takes")
    parser.add_argument("--folder", type=Path, help="keep runs and logs here; by default they are deleted")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the job first
    with tempfile.TemporaryDirectory(prefix="torture-") as temporary:
        folder = Path(temporary)
        if arguments.folder is not None:
            folder = arguments.folder.resolve()
            folder.mkdir(parents=True, exist_ok=True)
        csv = arguments.csv.resolve() if arguments.csv else None
        flags = [*map(str, FLAGS), "--cache_dir", str(folder / "cache"), *(["--csv", str(csv)] if csv else [])]
        models = {name: write_model(name, csv, folder / name) for name in dict.fromkeys(arguments.models)}
        return inject_faults(arguments.kills, arguments.seed, arguments.ranks, models, flags, folder)


def inject_faults(kills: int, seed: int, ranks: int, models: dict[str, str], flags: list[str], folder: Path) -> int:
    """Run jobs of all combinations of path and architecture in turn until so many ranks have been killed.

    Args:
        models: the value of `--model` for each architecture.

    Returns:
        The exit status.
    """
    chance = random.Random(seed)
    combinations = list(product(PATHS, models))
    undisturbed: dict[tuple[str, str], dict[str, str]] = {}
    seconds: dict[tuple[str, str], float] = {}
    for path_name, model in combinations:
        started = time.monotonic()
        place = folder / f"undisturbed-{path_name}-{model}"
        with Job(path_name, place, ranks, ["--model", models[model], *flags]) as job:
            problem = wait(job)
        if problem is not None:
            print(f"{path_name} {model}, undisturbed: {problem}\n{job.log.read_text()}", file=sys.stderr)
            return 1
        result = undisturbed[path_name, model] = result_of(job.folder)
        took = seconds[path_name, model] = time.monotonic() - started
        print(f"{path_name} {model}: {took:.0f} s undisturbed, weights {result['model/model.safetensors'][:16]}")

    head = (
        f"{'job':>3}  {'path':<11}  {'model':<5}  {'killed (rank)':<80}  {'generations':>11}  {'resumed at step':<16}"
    )
    print(f"{head}  {'seconds':>7}  {'restart':>7}  hash equal?", flush=True)
    killed, number = 0, 0
    verdicts: dict[tuple[str, str], list[bool]] = {combination: [] for combination in combinations}
    while killed < kills:
        path_name, model = combination = combinations[number % len(combinations)]
        number += 1
        started = time.monotonic()
        faults: list[str] = []
        restarts: list[float] = []  # seconds from each kill to the processes that replace the killed ones
        with Job(path_name, folder / f"job-{number}", ranks, ["--model", models[model], *flags]) as job:
            for _ in range(min(chance.randint(1, RESTARTS), kills - killed)):
                moment, rank = chance.choice(MOMENTS), chance.randrange(ranks)
                target = job.rank(rank, generation=len(faults))
                if target is not None and kill(target, job, moment(chance, seconds[combination])):
                    faults.append(f"{moment.__name__} ({rank})")
                    died = time.monotonic()
                    if job.rank(0, generation=len(faults)) is not None:
                        restarts.append(time.monotonic() - died)
            problem = wait(job) or differences(job.folder, undisturbed[combination])
        killed += len(faults)
        took = time.monotonic() - started
        log = job.log.read_text()
        verdicts[combination].append(problem is None)
        resumed = ", ".join(re.findall(r"resumed from .*\(step (\d+)\)", log)) or "0"
        where = ", ".join(faults).replace("_", " ") or "ended before it could be killed"
        restart = f"{max(restarts, default=0):7.1f}"
        line = f"{number:>3}  {path_name:<11}  {model:<5}  {where:<80}  {len(faults) + 1:>11}  {resumed:<16}"
        print(f"{line}  {took:7.1f}  {restart}  {problem or 'yes'}", flush=True)
        if problem is not None:
            print(log, file=sys.stderr)
    good = sum(map(sum, verdicts.values()))
    totals = ", ".join(f"{' '.join(names)} {sum(its)}/{len(its)}" for names, its in verdicts.items())
    print(f"{killed} kills in {number} jobs: {good} of {number} ended like the undisturbed one ({totals})")
    return 0 if good == number else 1


if __name__ == "__main__":
    sys.exit(main())
