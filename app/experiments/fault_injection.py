"""Fault injection: kill ranks of real torchrun jobs with SIGKILL, at random moments, on both training paths.

    python -m app.experiments.fault_injection --kills 100 --seed 0 --csv reviews.csv

Each job runs under plain `torchrun --max-restarts=3`, with a random strategy, and loses one to three ranks: at
start-up, in a step, while a checkpoint is written, in an evaluation, right before the exit, or at any time. Without
intervention, it must end with status 0 and with the weights, predictions, steps and evaluations of an uninterrupted job
of the same path and architecture with `ddp`. One line is printed per job, and totals in the last line. The exit status
is 1 if any job differs.
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, product
from pathlib import Path
from typing import Any

from ..cli import OneLineParser, count
from ..common.files import check_exists
from ..common.paths import PACKAGE
from ..distributed.launcher import TorchrunJob, torchrun_command
from ..jobs import PATHS
from ..program import run_program
from ..runs.hashes import DIGITS, hash_results
from ..runs.schema import MODEL, MODEL_FOLDER
from ..setting_groups import TINY_BERT
from ..settings import STRATEGIES, Settings
from .fault_kills import EVAL_STEPS, MOMENTS, SAVE_STEPS, STEPS, RunFiles, draw_moment, kill, wait_for_rank

MODELS = ("bert", "gpt2", "bart")
RESTARTS = 3
FLAGS = [
    *("--max_steps", STEPS, "--save_strategy", "steps", "--save_steps", SAVE_STEPS, "--dropout", 0.1),
    *("--eval_strategy", "steps", "--eval_steps", EVAL_STEPS, "--validation_size", 0.1, "--load_best_model_at_end"),
    *("--max_length", 32, "--threads", 1, "--disable_tqdm", "--use_cpu"),
    *("--eval_batch_size", 8),  # small batches make evaluations long enough to kill a rank in them
]
TIME_LIMIT = 300.0  # seconds; a job that takes longer is considered to hang
LINE = "{:>3}  {:<11}  {:<5}  {:<8}  {:<80}  {:>11}  {:<16}  {:>7}  {:>7}  {}"
HEADER = (
    *("job", "path", "model", "strategy", "killed (rank)", "attempts"),
    *("resumed at step", "seconds", "restart", "identical"),
)


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--kills", type=count, default=50, metavar="N", help="total number of ranks to kill")
    parser.add_argument("--seed", type=int, default=0, help="seed of the killed ranks and the moments")
    parser.add_argument("--ranks", type=count, default=2, metavar="N", help="processes per job")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="architectures (default: all)")
    parser.add_argument("--csv", type=Path, help="reviews to train on (default: the same as for a training run)")
    parser.add_argument("--folder", type=Path, help="keep runs and logs here (default: delete them)")
    arguments = parser.parse_args()
    settings = Settings(csv=str(arguments.csv.resolve()) if arguments.csv else None)
    check_exists(settings.csv_path)
    with tempfile.TemporaryDirectory(prefix="fault-injection-") as temporary:
        folder = arguments.folder.resolve() if arguments.folder else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        subjects = build_subjects(arguments.models, settings, arguments.ranks, folder=folder)
        return inject_faults(subjects, arguments.kills, folder, rng=random.Random(arguments.seed))


# ---- subjects --------------------------------------------------------------------------------------------------------


@dataclass
class Subject:
    """A training path with an architecture, on which jobs are run."""

    path_name: str
    model_name: str
    flags: Sequence[str]  # of the training run, without the strategy and the folder
    ranks: int
    seconds: float = 0.0  # the duration of an uninterrupted job
    hashes: dict[str, str] = field(default_factory=dict)  # of the results of an uninterrupted job
    identical: list[bool] = field(default_factory=list)  # for each job with kills, whether it has these results

    @property
    def name(self) -> str:
        return f"{self.path_name} {self.model_name}"

    def job(self, folder: Path, strategy: str) -> TorchrunJob:
        """Return a job that trains into `folder` and logs to `folder.log`."""
        flags = [*self.flags, "--strategy", strategy, "--output_dir", folder]
        torchrun_flags = ["--standalone", f"--max-restarts={RESTARTS}"]
        module = f"{PACKAGE}.{self.path_name}"
        command = torchrun_command(module, flags, nproc_per_node=self.ranks, torchrun_flags=torchrun_flags)
        log = folder.with_suffix(".log")
        return TorchrunJob(command, environment={"HF_HUB_OFFLINE": "1"}, stdout=log, grace_seconds=0)


def build_subjects(model_names: Sequence[str], settings: Settings, ranks: int, *, folder: Path) -> list[Subject]:
    """Return every path with every architecture. The token cache and the models are written into `folder`."""
    from ..data.reviews import read_reviews  # here, like the others that import torch: --help needs none of it

    texts = read_reviews(settings.csv_path, settings.text_column, settings.label_column).texts
    models = {name: write_untrained(name, texts, folder / name) for name in dict.fromkeys(model_names)}
    flags = [*map(str, FLAGS), "--cache_dir", str(folder / "cache"), *(["--csv", settings.csv] if settings.csv else [])]
    return [Subject(path, name, ["--model", models[name], *flags], ranks) for path, name in product(PATHS, models)]


def write_untrained(name: str, texts: Any, folder: Path) -> str:
    """Return the value of `--model` for an architecture: `tiny-bert`, or a folder with a tiny config and a tokenizer.

    The folder contains no weights, so they are initialized from the seed.
    """
    if name == "bert":
        return TINY_BERT
    from transformers import BartConfig, GPT2Config, PretrainedConfig

    from ..model.built_in import VOCABULARY_SIZES, learn_tokenizer

    tokenizer = learn_tokenizer(texts, VOCABULARY_SIZES[TINY_BERT])
    ids: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,  # in every row, where BART's classifier reads its sentence vector
    }
    if name == "gpt2":
        config: PretrainedConfig = GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=2, **ids)
    else:
        layers = {"layers": 1, "attention_heads": 2, "ffn_dim": 64}
        ids |= {f"{part}_{key}": n for part in ("encoder", "decoder") for key, n in layers.items()}
        ids |= {"decoder_start_token_id": tokenizer.sep_token_id, "tie_word_embeddings": True}
        config = BartConfig(d_model=32, max_position_embeddings=64, **ids)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


# ---- jobs ------------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """How a job ended."""

    log: str = ""  # standard output and standard error
    problem: str | None = None  # the reason why the result is not correct
    kills: list[str] = field(default_factory=list)  # the moment and rank of each kill
    restart_seconds: list[float] = field(default_factory=list)  # for each kill, until the new rank 0 exists
    seconds: float = 0.0  # the duration of the job


def inject_faults(subjects: Sequence[Subject], kills: int, folder: Path, *, rng: random.Random) -> int:
    """Run jobs of all subjects in turn until enough ranks have been killed; return the exit status."""
    for subject in subjects:
        run_folder = folder / f"uninterrupted-{subject.path_name}-{subject.model_name}"
        outcome = run_job(subject, "ddp", run_folder, kills=0, rng=rng)
        if outcome.problem is not None:
            print(f"{outcome.log}\n{subject.name}, uninterrupted: {outcome.problem}", file=sys.stderr)
            return 1
        subject.hashes, subject.seconds = hash_results(run_folder), outcome.seconds
        weights = subject.hashes[f"{MODEL_FOLDER}/{MODEL}"][:DIGITS]
        print(f"{subject.name}: {outcome.seconds:.0f} s uninterrupted, weights {weights}")

    print(LINE.format(*HEADER), flush=True)
    killed, number = 0, 0
    for subject in cycle(subjects):
        if killed >= kills:
            break
        number += 1
        kills_of_job = min(rng.randint(1, RESTARTS), kills - killed)
        strategy = rng.choice(STRATEGIES)  # all have the bits of `ddp`
        outcome = run_job(subject, strategy, folder / f"job-{number}", kills=kills_of_job, rng=rng)
        outcome.problem = outcome.problem or find_difference(folder / f"job-{number}", subject.hashes)
        killed += len(outcome.kills)
        subject.identical.append(outcome.problem is None)
        print_outcome(number, subject, strategy, outcome=outcome)
    identical = sum(sum(subject.identical) for subject in subjects)
    totals = ", ".join(f"{subject.name} {sum(subject.identical)}/{len(subject.identical)}" for subject in subjects)
    share = f"all {number}" if identical == number else f"{identical} of {number}"
    print(f"{killed} kills in {number} jobs: {share} are bitwise identical to the uninterrupted ones ({totals})")
    return 0 if identical == number else 1


def run_job(subject: Subject, strategy: str, folder: Path, *, kills: int, rng: random.Random) -> Outcome:
    """Run one job into `folder`, and kill ranks in it; fewer if it ends earlier."""
    started = time.monotonic()
    files, outcome = RunFiles(folder), Outcome()
    with subject.job(folder, strategy) as job:
        for _ in range(kills):
            kind, rank = rng.choice(MOMENTS), rng.randrange(subject.ranks)
            target = wait_for_rank(job, rank, len(outcome.kills), files=files)
            if target is not None and kill(target, job, files, moment=draw_moment(kind, rng, subject.seconds)):
                outcome.kills.append(f"{kind} ({rank})")
                killed = time.monotonic()
                if wait_for_rank(job, 0, len(outcome.kills), files=files) is not None:
                    outcome.restart_seconds.append(time.monotonic() - killed)
        outcome.problem = wait_for_end(job)
    outcome.seconds = time.monotonic() - started
    outcome.log = folder.with_suffix(".log").read_text()
    return outcome


def wait_for_end(job: TorchrunJob) -> str | None:
    """Return the problem with the job's end, or None."""
    try:
        status = job.wait(TIME_LIMIT)
    except TimeoutError:
        return f"took more than {TIME_LIMIT:.0f} s"
    leftovers = job.kill_leftovers()
    if status != 0:
        return f"status {status}"
    return f"{len(leftovers)} processes left: {'; '.join(leftovers)}" if leftovers else None


def find_difference(folder: Path, uninterrupted: dict[str, str]) -> str | None:
    """Return the results that differ from the uninterrupted run, or None."""
    try:
        hashes = hash_results(folder)
    except (OSError, ValueError) as problem:
        return f"incomplete run: {problem}"
    differing = [name for name in uninterrupted if hashes[name] != uninterrupted[name]]
    return f"{', '.join(differing)} differ" if differing else None


def print_outcome(number: int, subject: Subject, strategy: str, *, outcome: Outcome) -> None:
    """Print the job's line of the table, and its log if anything is wrong."""
    cells = (
        *(number, subject.path_name, subject.model_name, strategy),
        ", ".join(outcome.kills) or "ended before it could be killed",
        len(outcome.kills) + 1,
        ", ".join(re.findall(r"resumed from .*\(step (\d+)\)", outcome.log)) or "0",
        f"{outcome.seconds:.1f}",
        f"{max(outcome.restart_seconds, default=0):.1f}",
        outcome.problem or "yes",
    )
    print(LINE.format(*cells), flush=True)
    if outcome.problem is not None:
        print(outcome.log, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_program(main))
