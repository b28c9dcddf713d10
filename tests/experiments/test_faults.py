"""Fault injection without training: how it observes a run, kills a process, and compares results."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys

import psutil
import pytest
from helpers.run_folders import edit_step, write_run

from app.distributed.launcher import TorchrunJob
from app.experiments import faults
from app.experiments.faults import EVAL_STEPS, MAX_STEPS, MOMENTS, SAVE_STEPS, Job, draw_moment, find_difference, kill
from app.program import run_program
from app.runs.hashes import hash_results


@pytest.fixture
def process(tmp_path):
    """A running process that stands for the job and for its only rank."""
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    with TorchrunJob(command, stdout=tmp_path / "log", grace_seconds=0) as running:
        yield running


@pytest.fixture
def job(tmp_path):
    """A job that has written two steps, an evaluation, and a checkpoint that is not complete."""
    (tmp_path / "steps.jsonl").write_text('{"step": 1}\n{"step": 12}\n')
    (tmp_path / "evaluations.jsonl").write_text('{"step": 6}\n')
    (tmp_path / "checkpoints" / ".checkpoint-10.tmp").mkdir(parents=True)
    return Job("ddp_loop", "ddp", tmp_path)


def test_only_what_the_current_processes_have_written_counts(job):
    assert (job.last_step("steps.jsonl"), job.is_saving(), job.is_evaluating()) == (12, True, True)
    job.since = (job.folder / "steps.jsonl").stat().st_mtime + 1
    assert (job.last_step("steps.jsonl"), job.is_saving(), job.is_evaluating()) == (0, False, False)
    os.utime(job.folder / "steps.jsonl", (job.since + 1, job.since + 1))
    assert job.last_step("steps.jsonl") == 12
    with (job.folder / "steps.jsonl").open("a") as log:
        log.write('{"st')
    assert job.last_step("steps.jsonl") == 0, "a line that is being written"


def test_the_moment_of_an_evaluation_is_after_a_step_at_which_only_an_evaluation_is_due(job):
    (job.folder / "evaluations.jsonl").write_text('{"step": 0}\n')

    def holds_after(step: int) -> bool:
        (job.folder / "steps.jsonl").write_text(json.dumps({"step": step}) + "\n")
        return job.is_evaluating()

    found = {step for step in range(1, MAX_STEPS + 1) if holds_after(step)}
    assert found == {s for s in range(EVAL_STEPS, MAX_STEPS, EVAL_STEPS) if s % SAVE_STEPS}
    (job.folder / "evaluations.jsonl").write_text(json.dumps({"step": max(found)}) + "\n")
    assert not holds_after(max(found)), "the evaluation is over"


@pytest.mark.parametrize("moment", MOMENTS)
def test_each_moment_comes(job, moment):
    for name in ("metrics.json", "predictions.csv", ".model.tmp"):
        (job.folder / name).write_text("")
    (job.folder / "steps.jsonl").write_text(f'{{"step": {24 if moment == "in an evaluation" else 35}}}\n')
    drawn = [draw_moment(job, moment, random.Random(seed), usual_seconds=9.0)[0]() for seed in range(9)]
    assert any(drawn)


def test_a_rank_is_killed_at_its_moment(process):
    assert kill(psutil.Process(process.torchrun.pid), process, lambda: True, delay=0.0)
    assert process.wait(10) == -signal.SIGKILL


def test_a_rank_survives_a_moment_that_has_passed(process):
    conditions = iter([True, False])  # it holds before the delay and not after it

    def condition() -> bool:
        holds = next(conditions, None)
        if holds is None:
            process.torchrun.kill()
        return bool(holds)

    assert not kill(psutil.Process(process.torchrun.pid), process, condition, delay=0.0)
    assert next(conditions, None) is None


def test_results_are_compared_without_their_times(review_csv, tmp_path):
    uninterrupted = write_run(tmp_path / "a", review_csv())
    shutil.copytree(uninterrupted, tmp_path / "b")
    hashes = hash_results(uninterrupted)
    edit_step(tmp_path / "b", 3, seconds=99.0)
    assert find_difference(tmp_path / "b", hashes) is None
    edit_step(tmp_path / "b", 3, loss=0.25)
    assert find_difference(tmp_path / "b", hashes) == "steps.jsonl differ"
    (tmp_path / "b" / "predictions.csv").unlink()
    assert find_difference(tmp_path / "b", hashes).startswith("incomplete run: ")


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--kills", "0"], "argument --kills: 0: must be a whole number, 1 or more"),
        (["--ranks", "-1"], "argument --ranks: -1: must be a whole number, 1 or more"),
        (["--csv", "missing.csv"], "missing.csv: no such file"),
        (["--kills", "x"], "argument --kills: x: must be a whole number, 1 or more"),
        (["--kils", "1"], "unknown argument --kils 1"),
    ],
)
def test_a_mistake_is_one_line(monkeypatch, capsys, flags, names):
    monkeypatch.setattr(sys, "argv", ["faults", *flags])
    assert run_program(faults.main) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert names in line
