"""Fault injection without training: the moments at which a process is killed, and what is reported."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers.run_folders import edit_step, write_run

from app.common.errors import RunError
from app.distributed.launcher import TorchrunJob
from app.experiments import faults
from app.experiments.faults import draw_moment, inject_faults, is_written, kill
from app.program import run_program
from app.settings import Settings


@pytest.fixture
def process(tmp_path):
    """A running process that stands for the job and for its only rank."""
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    with TorchrunJob(command, stdout=tmp_path / "log") as running:
        yield running


def test_only_what_the_current_processes_have_written_counts(tmp_path):
    (tmp_path / "file").touch()
    since = (tmp_path / "file").stat().st_mtime + 1
    assert not is_written(tmp_path / "file", since)
    os.utime(tmp_path / "file", (since + 1, since + 1))
    assert is_written(tmp_path / "file", since)
    assert not is_written(tmp_path / "none", since)


def test_each_moment_comes(tmp_path):
    """Draw often after checkpoint 10 is complete; then each file that a rank may be killed at is written."""
    (tmp_path / "checkpoints" / "checkpoint-10").mkdir(parents=True)
    drawn = [draw_moment(tmp_path, random.Random(seed), usual_seconds=9.0)[:2] for seed in range(60)]
    assert {moment for moment, is_now in drawn if is_now()} == {"at any time"}
    later = time.time() + 1
    for name in (
        "metrics.json",
        "predictions.csv",
        ".model.tmp",
        *(f"checkpoints/.checkpoint-{n}.tmp" for n in (15, 20, 25)),
    ):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (later, later))
    moments = {moment for moment, is_now in drawn if is_now()}
    assert moments == {
        *(f"while checkpoint {step} is written" for step in (15, 20, 25)),
        *("before the exit", "at any time"),
    }
    assert all(is_now() for _, is_now in drawn)


def test_a_rank_is_killed_at_its_moment(process):
    assert kill(psutil.Process(process.torchrun.pid), process, lambda: True, delay=0.0)
    assert process.torchrun.wait(10) == -signal.SIGKILL


def test_a_rank_survives_a_moment_that_has_passed(process):
    conditions = iter([True, False])  # it holds before the delay and not after it

    def condition() -> bool:
        holds = next(conditions, None)
        if holds is None:
            process.torchrun.kill()
        return bool(holds)

    assert not kill(psutil.Process(process.torchrun.pid), process, condition, delay=0.0)
    assert next(conditions, None) is None


@pytest.mark.parametrize(("changes", "problem"), [({"loss": 0.25}, "bitwise identical"), ({"seconds": 99.0}, None)])
def test_a_job_with_other_results_ends_the_program(review_csv, tmp_path, monkeypatch, capsys, changes, problem):
    csv = review_csv()

    def build_job(path_name, ranks, settings, **more):
        run = write_run(Path(settings.output_dir), csv, path=path_name)
        edit_step(run, 3, **changes)
        more["log"].write_text("")
        return TorchrunJob([sys.executable, "-c", "import signal; signal.pause()"], stdout=more["log"])

    def draw(*_):
        return "now", lambda: True, 0.0

    monkeypatch.setattr(
        faults, "train_cell", lambda cell, settings, folder, rng: write_run(folder / cell.folder_name, csv)
    )
    monkeypatch.setattr(faults, "build_job", build_job)
    monkeypatch.setattr(faults, "draw_moment", draw)
    monkeypatch.setattr(TorchrunJob, "find_rank", lambda job, *_: psutil.Process(job.torchrun.pid))
    monkeypatch.setattr(faults, "wait_for_success", lambda job: job.torchrun.wait(10))
    settings = Settings(csv=str(csv))
    if problem:
        with pytest.raises(RunError, match=f"^1-trainer_run-.* is not {problem}: python -m app.compare "):
            inject_faults(settings, 2, 1, folder=tmp_path, rng=random.Random(0))
    else:
        inject_faults(settings, 2, 1, folder=tmp_path, rng=random.Random(0))
        assert capsys.readouterr().out.splitlines()[-1].startswith("1 kills in 1 jobs: all 1 are bitwise identical")


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--kills", "0"], "argument --kills: 0: must be a whole number, 1 or more"),
        (["--ranks", "-1"], "argument --ranks: -1: must be a whole number, 1 or more"),
        (["--csv", "missing.csv"], "missing.csv: no such file"),
        (["--kils", "1"], "unknown argument --kils 1"),
    ],
)
def test_a_mistake_is_one_line(monkeypatch, capsys, flags, names):
    monkeypatch.setattr(sys, "argv", ["faults", *flags])
    assert run_program(faults.main) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert names in line
