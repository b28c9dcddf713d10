"""Jobs that tests start: their output, what they leave behind, and how to end all of their processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

PROJECT = Path(__file__).parents[1]
SAMPLE_CSV = PROJECT / "data" / "sample_reviews.csv"
MANY_RUNS = PROJECT / "tests" / "launched" / "many_runs.py"
LIMIT = 240  # seconds for a job: a limit only has to end what hangs, also on a machine three times as slow as a laptop


def in_ci() -> bool:
    """Whether continuous integration runs the tests: CI systems set CI."""
    return bool(os.environ.get("CI"))


def unavailable(reason: str) -> NoReturn:
    """Skip a test that this machine cannot run. In CI the test fails instead: CI must not pass without its proofs.

    Args:
        reason: what is missing, and how to get it.
    """
    if in_ci():
        pytest.fail(f"{reason} (in CI a proof is never skipped)", pytrace=False)
    pytest.skip(reason)


def find_real_csv() -> Path | None:
    """The real hotel reviews, which are not part of the repository; None if this machine does not have them."""
    for path in (os.environ.get("CHNSENTICORP_CSV"), PROJECT / "data" / "ChnSentiCorp_htl_all.csv"):
        if path and Path(path).is_file():
            return Path(path)
    return None


def read_steps(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


# ---- processes ------------------------------------------------------------------------------------------------------


def processes_of(mark: str) -> list[psutil.Process]:
    """All processes, whatever their session or parent, that were started with this mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("SAMEBITS_TEST_JOB") == mark:
                found.append(process)
        except (psutil.Error, OSError):  # it ended while its environment was being read, or belongs to another user
            continue
    return found


def end_processes(mark: str, patience: float = 30) -> list[str]:
    """End what is left of a job that should have ended.

    Args:
        patience: seconds that the processes get to end by themselves: torchrun's own helpers take a moment to notice
            that their parent has ended, and a rank finishes its step first.

    Returns:
        The command line of each process that had to be killed.
    """
    _, alive = psutil.wait_procs(processes_of(mark), timeout=patience)
    left = []
    for process in alive:
        with suppress(psutil.Error):
            left.append(" ".join(process.cmdline()))
            process.send_signal(signal.SIGKILL)
    return left


def command_of(module: str, flags: Sequence[Any], ranks: int, torchrun: Sequence[str] = ("--standalone",)) -> list[str]:
    """The command that starts a module in `ranks` processes under torchrun, or in plain Python for 0.

    Args:
        module: its name, or the path of a script.
        torchrun: flags of torchrun; by default a single node with a free port of its own.
    """
    program = [module] if module.endswith(".py") else ["-m", module]
    launcher = ["-m", "torch.distributed.run", *torchrun, f"--nproc_per_node={ranks}"] if ranks else []
    return [sys.executable, *launcher, *program, *map(str, flags)]


def environment_of(mark: str) -> dict[str, str]:
    """The environment of a job's processes, which `processes_of` finds by the mark."""
    variables = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    path = os.pathsep.join([str(PROJECT), str(PROJECT / "tests")])
    return variables | {"PYTHONPATH": path, "SAMEBITS_TEST_JOB": mark, "HF_HUB_OFFLINE": "1"}


@dataclass
class Finished:
    """A job that has ended."""

    status: int
    out: str
    err: str

    @property
    def error_lines(self) -> list[str]:
        """The lines with which the program itself reports an error."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


class Job:
    """A job in processes of its own. Use it as a context manager: its end leaves no process behind.

    Args:
        program: `ddp_loop`, `trainer_run`, another module's full name, or the path of a script.
        flags: its command line.
        cwd: its working directory.
        ranks: processes, or 0 for plain Python.
        torchrun: as for `command_of`.
        prefix: a command that runs the job, such as `unshare -m`.
        environment: more variables.
    """

    def __init__(
        self,
        program: str,
        *flags: Any,
        cwd: Path,
        ranks: int = 2,
        torchrun: Sequence[str] = ("--standalone",),
        prefix: Sequence[str] = (),
        **environment: str,
    ) -> None:
        self.mark = uuid.uuid4().hex
        module = program if program.endswith(".py") or "." in program else f"app.{program}"
        self.command = [*prefix, *command_of(module, flags, ranks, torchrun)]
        variables = environment_of(self.mark) | environment
        self._folder = tempfile.TemporaryDirectory()
        self.logs = [Path(self._folder.name, name) for name in ("out", "err")]
        with self.logs[0].open("w") as out, self.logs[1].open("w") as err:
            self.process = subprocess.Popen(
                self.command, cwd=cwd, env=variables, stdout=out, stderr=err, start_new_session=True
            )

    def rank(self, rank: int) -> psutil.Process:
        """The process of a rank."""
        return next(p for p in processes_of(self.mark) if p.environ().get("RANK") == str(rank))

    def wait_for(self, holds: Callable[[], bool], limit: float = LIMIT) -> None:
        """Wait until a condition holds while the job runs."""
        deadline = time.monotonic() + limit
        while not holds():
            assert self.process.poll() is None, f"ended too early:\n{self.text}"
            assert time.monotonic() < deadline, f"nothing happened in {limit} s:\n{self.text}"
            time.sleep(0.01)

    def finish(self, limit: float = LIMIT) -> Finished:
        """Wait for the job's end. Fail if it does not end within `limit` seconds, or leaves a process behind."""
        try:
            self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.command} took more than {limit} s:\n{self.text}") from None
        left = end_processes(self.mark)
        assert not left, f"{self.command} left processes behind: {left}"
        return Finished(self.process.returncode, *(log.read_text() for log in self.logs))

    @property
    def text(self) -> str:
        """All that the job has printed so far."""
        return "\n".join(log.read_text() for log in self.logs)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        for process in processes_of(self.mark):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        self._folder.cleanup()


# ---- many trainings in one job --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingRun:
    """One of the runs that `run_many` trains.

    Attributes:
        path: `ddp_loop` or `trainer_run`.
        flags: its command line; `{rank}` in a flag becomes the rank's number.
        mutation: the change, of those in `launched/mutations.py`, that is made for this run only.
        inspect: whether to look into DDP, config and tokenizer (`Outcome.inspection`).
        copies: folders to copy before the run: (source, target) pairs.
        moves: files and folders to rename before the run, after the copies: (source, target) pairs.
    """

    path: str
    flags: Sequence[Any] = ()
    mutation: str | None = None
    inspect: bool = False
    copies: Sequence[tuple[Any, Any]] = ()
    moves: Sequence[tuple[Any, Any]] = ()


@dataclass(frozen=True)
class Outcome:
    """What rank 0 knows about a run that `run_many` trained.

    Attributes:
        problem: the exception's type and text; None if the run finished.
        out: what rank 0 printed.
        inspection: `ddp`, its plain attributes, and `changes` in config and tokenizer, each (before, after).
    """

    problem: str | None
    out: str
    inspection: dict[str, Any]


def run_many(
    folder: Path, runs: Mapping[str, TrainingRun], ranks: int = 2, limit: float = 600, **environment: str
) -> dict[str, Outcome]:
    """Train many runs one after another in one job on CPUs, with one thread per rank.

    Args:
        folder: the job's working directory. A run's own folder is `folder/name` unless its flags name another.
        runs: the runs, by name.
        ranks: processes, or 0 for plain Python.
        limit: seconds for all of them together.

    Returns:
        The outcome of each run, by name.
    """
    common = ["--use_cpu", "--threads=1", "--disable_tqdm", "--cache_dir=cache"]
    content = {}
    for name, run in runs.items():
        flags = [*common, *map(str, run.flags)]
        if not any(flag.startswith("--output_dir") for flag in flags):
            flags.append(f"--output_dir={name}")
        content[name] = vars(run) | {"flags": flags}
    file = folder / f"job-{uuid.uuid4().hex}" / "runs.json"
    file.parent.mkdir()
    file.write_text(json.dumps(content, default=str))
    flags = ["--use_cpu", "--threads=1", "--ddp_timeout=120"]
    with Job(str(MANY_RUNS), *flags, cwd=folder, ranks=ranks, RUNS=str(file), **environment) as job:
        done = job.finish(limit)
    assert done.status == 0, done.out + done.err
    return {name: Outcome(**x) for name, x in json.loads(file.with_name("outcomes.json").read_text()).items()}


def require_success(outcomes: Mapping[str, Outcome]) -> None:
    """Assert that every run finished."""
    assert {name: outcome.problem for name, outcome in outcomes.items()} == dict.fromkeys(outcomes)
