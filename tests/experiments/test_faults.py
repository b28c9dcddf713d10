"""Fault injection without training: the moments at which a process is killed, and what is reported."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers.run_folders import edit_step, write_run

from app.common.errors import RunError
from app.distributed.launcher import TorchrunJob
from app.experiments import faults
from app.experiments.faults import draw_moment, inject_faults
from app.settings import Settings

WAIT = [sys.executable, "-c", "import signal; signal.pause()"]  # stands for a job and for its only rank


def test_each_moment_comes_by_what_the_current_processes_write(tmp_path):
    """Draw often after checkpoint 10 is complete; then each file that a rank may be killed at is written."""
    (tmp_path / "checkpoints" / "checkpoint-10").mkdir(parents=True)
    (tmp_path / "metrics.json").touch()
    drawn = [draw_moment(tmp_path, random.Random(seed), usual_seconds=9.0)[:2] for seed in range(60)]
    assert {moment for moment, is_now in drawn if is_now()} == {"at any time"}
    later = time.time() + 1
    staging = [f"checkpoints/.checkpoint-{step}.tmp" for step in (15, 20, 25)]
    for name in ("metrics.json", "predictions.csv", ".model.tmp", *staging):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (later, later))
    assert all(is_now() for _, is_now in drawn)
    while_written = [f"while checkpoint {step} is written" for step in (15, 20, 25)]
    assert {moment for moment, _ in drawn} == {*while_written, "before the exit", "at any time"}


def test_a_job_with_other_results_ends_the_program(review_csv, tmp_path, monkeypatch):
    """tests/launched/test_commands.py kills real ranks, whose results are the same."""
    csv = review_csv()

    def build_job(path_name, ranks, settings, *, log, max_restarts):
        edit_step(write_run(Path(settings.output_dir), csv, path=path_name), 3, loss=0.25)
        return TorchrunJob(WAIT, stdout=log)

    monkeypatch.setattr(faults, "train_cell", lambda cell, _, folder, **__: write_run(folder / cell.folder_name, csv))
    monkeypatch.setattr(faults, "build_job", build_job)
    monkeypatch.setattr(faults, "draw_moment", lambda *_: ("now", lambda: True, 0.0))
    monkeypatch.setattr(TorchrunJob, "find_rank", lambda job, *_: psutil.Process(job.torchrun.pid))
    monkeypatch.setattr(faults, "wait_for_success", lambda job: job.torchrun.wait(10))
    with pytest.raises(RunError, match=r"^1-trainer_run-.* is not bitwise identical: python -m app\.compare "):
        inject_faults(Settings(csv=str(csv)), 2, 1, folder=tmp_path, rng=random.Random(0))
