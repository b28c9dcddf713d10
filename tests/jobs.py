"""Jobs that tests start: what they printed, what they left, and how to end all of their processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

PROJECT = Path(__file__).parents[1]
SAMPLE_CSV = PROJECT / "data" / "sample_reviews.csv"


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


@dataclass
class Finished:
    status: int
    out: str
    err: str

    @property
    def error_lines(self) -> list[str]:
        """The lines of ours that say what was wrong."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


def processes_of(mark: str) -> list[psutil.Process]:
    """All processes, whatever their session or parent, that were started with this mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("SAMEBITS_TEST_JOB") == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def end_processes(mark: str) -> list[str]:
    """Ends what is left of a job that should have ended; returns what it was."""
    # torchrun's own helpers take a moment to notice that their parent has gone, and ranks finish their step first.
    _, alive = psutil.wait_procs(processes_of(mark), timeout=15)
    left = []
    for process in alive:
        try:
            left.append(" ".join(process.cmdline()))
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    return left


def read_steps(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def command_of(module: str, flags: Sequence[Any], ranks: int, torchrun: Sequence[str] = ("--standalone",)) -> list[str]:
    """`ranks` processes under torchrun, or plain python for 0.

    Args:
        module: its name, or a script's path.
        torchrun: its flags; by default a single node with a free port of its own.
    """
    program = [module] if module.endswith(".py") else ["-m", module]
    launcher = ["-m", "torch.distributed.run", *torchrun, f"--nproc_per_node={ranks}"] if ranks else []
    return [sys.executable, *launcher, *program, *map(str, flags)]


def environment_of(mark: str) -> dict[str, str]:
    """What a job's processes are started with, and found by."""
    variables = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return variables | {"PYTHONPATH": str(PROJECT), "SAMEBITS_TEST_JOB": mark, "HF_HUB_OFFLINE": "1"}


class Job:
    """A torchrun job that runs while a test does something to it; as a context manager, so that nothing of it stays."""

    def __init__(
        self,
        road: str,
        *flags: Any,
        cwd: Path,
        ranks: int = 2,
        torchrun: Sequence[str] = ("--standalone",),
        prefix: Sequence[str] = (),
        **environment: str,
    ) -> None:
        """
        Args:
            road: `ddp_loop`, `trainer_run` or a script's path.
            ranks: processes, or 0 for plain python.
            torchrun: as for `command_of`.
            prefix: a command that runs the job, such as `unshare -m`.
            environment: more variables.
        """
        self.mark = uuid.uuid4().hex
        module = road if road.endswith(".py") else f"app.{road}"
        command = [*prefix, *command_of(module, flags, ranks, torchrun)]
        variables = environment_of(self.mark) | environment
        self.logs = [cwd / f"{self.mark}.{name}" for name in ("out", "err")]
        with self.logs[0].open("w") as out, self.logs[1].open("w") as err:
            self.torchrun = subprocess.Popen(
                command, cwd=cwd, env=variables, stdout=out, stderr=err, start_new_session=True
            )

    def rank(self, rank: int) -> psutil.Process:
        """The process that is this rank."""
        return next(p for p in processes_of(self.mark) if p.environ().get("RANK") == str(rank))

    def wait_for(self, holds: Callable[[], bool], limit: float = 90) -> None:
        """Waits until something holds while the job runs."""
        deadline = time.monotonic() + limit
        while not holds():
            assert self.torchrun.poll() is None, f"ended too early:\n{self.text}"
            assert time.monotonic() < deadline, f"nothing happened in {limit} s:\n{self.text}"
            time.sleep(0.01)

    def finish(self, limit: float = 120) -> Finished:
        """Waits for the end; fails where it does not come, or leaves a process."""
        try:
            self.torchrun.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"took more than {limit} s:\n{self.text}") from None
        left = end_processes(self.mark)
        assert not left, f"left processes behind: {left}"
        return Finished(self.torchrun.returncode, *(log.read_text() for log in self.logs))

    @property
    def text(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self.torchrun.poll() is None:
            self.torchrun.kill()
        for process in processes_of(self.mark):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.torchrun.wait()
