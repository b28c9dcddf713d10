"""A pytest plugin: its fixture fails a test if a training is not, in every bit, the one that was recorded.

    def test_the_change_is_neutral(trajectory):
        trajectory("classifier", train)  # train() returns or yields a dict per step, or returns the path of a log

`pytest --update-trajectories` records `trajectories/classifier.jsonl` beside the file of the test. With another CPU,
GPU, PyTorch or number of threads, which round differently, the test is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .common.errors import UserError, shorten
from .common.files import write_text

FLAG = "--update-trajectories"
NO_CHANGES = (":(exclude,top,glob)**/trajectories/*.jsonl", ":(exclude,top,glob)**/__pycache__/**")  # patterns of git


def pytest_addoption(parser: pytest.Parser) -> None:
    recording = "record what the fixture `trajectory` compares with, from a commit without further changes"
    parser.getgroup("samebits").addoption(FLAG, action="store_true", help=recording)


def pytest_configure(config: pytest.Config) -> None:
    """Reject a recording of code that is not committed: later, nobody could tell which code it was."""
    if config.getoption(FLAG):
        command = ["git", "status", "--porcelain", "--untracked-files=all", "--", ":/", *NO_CHANGES]
        try:
            changes = subprocess.check_output(command, cwd=config.rootpath, stderr=subprocess.PIPE, text=True)
        except (OSError, subprocess.CalledProcessError) as problem:
            reason = " ".join((getattr(problem, "stderr", None) or str(problem)).split())
            raise pytest.UsageError(f"{FLAG}: needs a git repository: {reason}") from None
        if files := ", ".join(line[3:] for line in changes.splitlines()):
            raise pytest.UsageError(f"{FLAG}: commit these changes first: {shorten(files, 200)}")


@pytest.fixture
def trajectory(request: pytest.FixtureRequest) -> Callable[[str, Callable[[], Any]], None]:
    """Compare a training with a recorded one, bitwise: `trajectory("name", run)`.

    `run()` returns or yields a mapping of numbers per step, which are counted from 1 unless there is a key `step`, or
    it returns the path of what `app.diff` reads.
    """

    def check(name: str, run: Callable[[], Any]) -> None:
        file, records = request.path.parent / "trajectories" / f"{name}.jsonl", request.config.getoption(FLAG)
        if not (records or file.exists()):
            pytest.fail(f"{file}: not recorded yet: run pytest {FLAG}", pytrace=False)
        rows = run()  # a UserError in it is not caught below, so pytest prints where it was raised
        rows = Path(rows) if isinstance(rows, str | os.PathLike) else list(rows)
        try:
            if difference := compare_or_record(file, rows, records):
                pytest.fail(difference, pytrace=False)
        except UserError as mistake:
            pytest.fail(str(mistake), pytrace=False)

    return check


def compare_or_record(file: Path, rows: Any, records: bool) -> str | None:
    """Return how a training differs from the recorded one; skip the test if that was recorded on other hardware."""
    from .diff import collect, compare, describe, read

    if isinstance(rows, Path):
        training = read(rows)
    else:
        lines = (json.dumps({"step": n} | dict(row), default=lambda x: x.item()) for n, row in enumerate(rows, 1))
        training = collect("this training", map(json.loads, lines))
    here = hardware()  # after the training, which may set the number of threads
    if records:
        logged = [{"step": step, quantity: value} for step, quantity, value in training.table.to_numpy()]
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, (json.dumps(line) + "\n" for line in ({"hardware": here}, *logged)))
        return None
    recorded = read(file)
    if recorded.settings.get("hardware") != here:
        pytest.skip(f"{file.name} was recorded with {recorded.settings.get('hardware')}, and this is {here}")
    result = compare(recorded, training)
    is_complete = all(x["in_A"] == x["in_B"] == x["common"] for x in result["quantities"].values())
    return None if result["equal"] and is_complete else describe(result)


def hardware() -> str:
    """Return the facts on which rounding depends."""
    import torch

    from .common.machine import kernels

    facts = kernels() | {"torch": torch.__version__, "threads": str(torch.get_num_threads())}
    facts["GPU"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
