"""Jobs that tests start: their output, what they leave behind, and how to end all of their processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

import pandas as pd
import psutil
import pytest
from helpers.rank_server import PIDS, ForkedJob, can_fork

from app.distributed.launcher import TorchrunJob, torchrun_command

PROJECT = Path(__file__).parents[2]
SAMPLE_CSV = PROJECT / "data" / "sample_reviews.csv"
MANY_RUNS = PROJECT / "tests" / "launched" / "many_runs.py"
ON_FAKE_GPUS = PROJECT / "tests" / "fake_cuda" / "launch.py"
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


def count_steps(run: Path) -> int:
    """Return how many steps a run has logged, while it trains."""
    return (run / "steps.jsonl").read_bytes().count(b"\n") if (run / "steps.jsonl").exists() else 0


def write_subset(csv: Path, target: Path, rows: int) -> None:
    """Write some rows of a CSV of reviews, the same ones each time, to another file."""
    pd.read_csv(csv).dropna().sample(rows, random_state=0).to_csv(target, index=False)


def write_reviews(path: Path, rows: int, classes: tuple[Any, ...] = (0, 1)) -> None:
    """Write a CSV whose classes differ in their words."""
    table = pd.DataFrame(
        {
            "label": [classes[0 if i % 3 == 0 else 1 + i % (len(classes) - 1)] for i in range(rows)],
            "review": [("差。" if i % 3 == 0 else "好，") * (1 + i % 17) + f"第{i}次" for i in range(rows)],
        }
    )
    table.to_csv(path, index=False)


# ---- jobs -----------------------------------------------------------------------------------------------------------


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


class Job(TorchrunJob):
    """A job whose output is kept. Leaving its context kills whatever is left of it.

    Args:
        program: `ddp_loop`, `trainer_run`, another module's full name, or the path of a script.
        flags: its command line.
        cwd: its working directory.
        ranks: processes, or 0 for plain Python.
        torchrun_flags: as for `torchrun_command`.
        prefix: a command that replaces itself with the job, such as `unshare -m`.
        real: start new interpreters, although forks of the rank server would do.
        environment: more variables.
    """

    def __init__(
        self,
        program: str,
        *flags: Any,
        cwd: Path,
        ranks: int = 2,
        torchrun_flags: Sequence[str] = ("--standalone",),
        prefix: Sequence[str] = (),
        real: bool = False,
        **environment: str,
    ) -> None:
        module = program if program.endswith(".py") or "." in program else f"app.{program}"
        self._folder = tempfile.TemporaryDirectory()
        super().__init__(
            [*prefix, *torchrun_command(module, flags, nproc_per_node=ranks, torchrun_flags=torchrun_flags)],
            environment={"HF_HUB_OFFLINE": "1", PIDS: self._folder.name} | environment,
            cwd=cwd,
            stdout=Path(self._folder.name, "out"),
            stderr=Path(self._folder.name, "err"),
        )
        on_fake_gpus = program == str(ON_FAKE_GPUS)  # replaces parts of torch before anything imports them
        self._forks = not (real or prefix or on_fake_gpus) and can_fork(self.environment)

    def __enter__(self) -> Self:
        if not self._forks:
            return super().__enter__()
        files = {"cwd": self.cwd, "stdout": self.stdout, "stderr": self.stderr}
        self.torchrun = ForkedJob(self.command, env=self.environment, **files)
        return self

    def processes(self) -> list[psutil.Process]:
        return self.torchrun.processes() if self._forks else super().processes()

    def rank(self, rank: int) -> psutil.Process:
        """The process of a rank."""
        if self._forks:
            return psutil.Process(int(Path(self._folder.name, str(rank)).read_text()))
        process = self.find_rank(rank)
        assert process is not None, f"no rank {rank}:\n{self.text}"
        return process

    def wait_for(self, holds: Callable[[], bool], limit: float = LIMIT) -> None:
        """Wait until a condition holds while the job runs."""
        deadline = time.monotonic() + limit

        def holds_in_time() -> bool:
            assert time.monotonic() < deadline, f"nothing happened in {limit} s:\n{self.text}"
            return holds()

        assert self.wait_until(holds_in_time), f"ended too early:\n{self.text}"

    def finish(self, limit: float = LIMIT, patience: float = 60) -> Finished:
        """Wait for the job's end. Fail if it does not end within `limit` seconds, or leaves a process behind."""
        try:
            status = self.torchrun.wait(limit)
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"{late}:\n{self.text}") from None
        deadline = time.monotonic() + patience  # torchrun's helpers take a moment to notice that it has ended
        while (leftovers := self.leftovers()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in leftovers:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(leftovers, timeout=10)
        assert not leftovers, f"{self.command} left processes behind"
        return Finished(status, self.stdout.read_text(), self.stderr.read_text())

    def leftovers(self) -> list[psutil.Process]:
        """The processes of the job that still run, with any parent."""
        if self._forks:
            return self.processes()
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it has ended, or is a zombie
                if process.environ().get(PIDS) == self._folder.name:
                    found.append(process)
        return found

    @property
    def text(self) -> str:
        """All that the job has printed so far."""
        return f"{self.stdout.read_text()}\n{self.stderr.read_text()}"

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        if isinstance(getattr(self, "torchrun", None), ForkedJob):
            self.torchrun.close()
        self._folder.cleanup()


# ---- many trainings in one job --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingRun:
    """One of the runs that `run_many` trains.

    Attributes:
        path: `ddp_loop` or `trainer_run`.
        flags: its command line; `{rank}` in a flag becomes the rank's number.
        loss_scale: the first loss scale of fp16, if it is another one for this run.
    """

    path: str
    flags: Sequence[Any] = ()
    loss_scale: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What rank 0 knows about a run that `run_many` trained.

    Attributes:
        problem: the exception's type and text; None if the run finished.
        out: what rank 0 printed.
        reports: on fake GPUs, the attributes of `fake_cuda.report.Report` on each rank.
    """

    problem: str | None
    out: str
    reports: list[dict[str, Any]]


def run_many(folder: Path, runs: Mapping[str, TrainingRun], **options: Any) -> dict[str, Outcome]:
    """Train the runs of one folder; arguments as for `run_folders`."""
    return run_folders(folder, {folder: runs}, **options)[folder]


def run_folders(
    folder: Path,
    runs: Mapping[Path, Mapping[str, TrainingRun]],
    ranks: int = 2,
    limit: float = 600,
    fake_gpus: bool = False,
    job_flags: Sequence[str] = (),
    **environment: str,
) -> dict[Path, dict[str, Outcome]]:
    """Train many runs one after another in one job, on CPUs or on fake GPUs, with one thread per rank.

    Args:
        folder: of the job's own files.
        runs: the runs, by working directory and name. A run's folder has its name unless its flags name another.
        ranks: processes, or 0 for plain Python.
        limit: seconds for all of them together.
        fake_gpus: use fake GPUs (see `tests/fake_cuda/README.md`) instead of CPUs.
        job_flags: what all runs of a process share, such as `--deterministic`; each run needs it as well.
        environment: variables of the job, such as RANKS_PER_NODE, which divides the ranks among several nodes.

    Returns:
        The outcome of each run, by working directory and name.
    """
    device = [] if fake_gpus else ["--use_cpu"]
    content = []
    for cwd, runs_there in runs.items():
        for name, run in runs_there.items():
            # The last one of equal flags counts.
            flags = [*device, "--threads=1", "--disable_tqdm", "--cache_dir=cache", f"--output_dir={name}", *run.flags]
            content.append({"path": run.path, "flags": flags, "loss_scale": run.loss_scale, "cwd": cwd})
    file = folder / f"job-{uuid.uuid4().hex}" / "runs.json"
    file.parent.mkdir()
    file.write_text(json.dumps(content, default=str))
    flags = [*device, *job_flags, "--threads=1", "--ddp_timeout=120"]
    program, *flags = [ON_FAKE_GPUS, MANY_RUNS, *flags] if fake_gpus else [MANY_RUNS, *flags]
    environment |= {"RUNS": str(file), "PYTHONPATH": os.pathsep.join([str(PROJECT), str(PROJECT / "tests")])}
    with Job(str(program), *flags, cwd=folder, ranks=ranks, **environment) as job:
        done = job.finish(limit)
    assert done.status == 0, done.out + done.err
    outcomes = iter(json.loads(file.with_name("outcomes.json").read_text()))
    return {cwd: {name: Outcome(**next(outcomes)) for name in runs_there} for cwd, runs_there in runs.items()}


def require_success(outcomes: Mapping[str, Outcome]) -> None:
    """Assert that every run finished."""
    problems = {name: outcome.problem for name, outcome in outcomes.items() if outcome.problem is not None}
    assert not problems, problems
