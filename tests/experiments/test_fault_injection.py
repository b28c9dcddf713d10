"""Fault injection without training: how it observes a run, kills a process, and compares results."""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys

import psutil
import pytest
from helpers.run_folders import edit_step, write_run

from app.distributed.launcher import TorchrunJob
from app.experiments import fault_injection
from app.experiments.fault_injection import find_difference
from app.experiments.fault_kills import EVAL_STEPS, SAVE_STEPS, STEPS, Moment, RunFiles, draw_moment, is_due, kill
from app.program import run_program
from app.runs.hashes import hash_results


@pytest.fixture
def job(tmp_path):
    """A running process that stands for the job and for its only rank."""
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    with TorchrunJob(command, stdout=tmp_path / "log", grace_seconds=0) as running:
        yield running


def test_a_run_is_training_once_the_current_processes_have_written_a_file(tmp_path):
    files = RunFiles(tmp_path)
    assert not files.is_training()
    (tmp_path / "settings.json").write_text("{}")
    assert files.is_training()
    files.ranks_restarted()
    assert not files.is_training(), "the file is from the processes before the restart"
    (tmp_path / "steps.jsonl").write_text('{"step": 1}\n')
    assert files.is_training()


def test_the_progress_of_a_run_is_read_from_its_files(tmp_path):
    files = RunFiles(tmp_path)
    assert (files.last_step("steps.jsonl"), files.checkpoint_in_staging()) == (0, 0)
    (tmp_path / "steps.jsonl").write_text('{"step": 1}\n{"step": 12}\n')
    (tmp_path / "checkpoints" / ".staging" / "checkpoint-10").mkdir(parents=True)
    assert (files.last_step("steps.jsonl"), files.checkpoint_in_staging()) == (12, 10)
    with (tmp_path / "steps.jsonl").open("a") as log:
        log.write('{"st')
    assert files.last_step("steps.jsonl") == 0, "a line that is being written"


def test_the_moment_of_an_evaluation_is_after_a_step_at_which_only_an_evaluation_is_due(tmp_path):
    condition = draw_moment("in an evaluation", random.Random(1), 10.0).condition
    files = RunFiles(tmp_path)
    (tmp_path / "evaluations.jsonl").write_text('{"step": 0}\n')

    def holds_after(step: int) -> bool:
        (tmp_path / "steps.jsonl").write_text(json.dumps({"step": step}) + "\n")
        return condition(files)

    hits = {step for step in range(1, STEPS + 1) if holds_after(step)}
    assert hits
    assert all(is_due(step, EVAL_STEPS) and not is_due(step, SAVE_STEPS) for step in hits)
    last = max(hits)
    assert holds_after(last)
    (tmp_path / "evaluations.jsonl").write_text(json.dumps({"step": last}) + "\n")
    assert not holds_after(last), "the evaluation is over"


def test_a_rank_is_killed_at_its_moment(job, tmp_path):
    target = psutil.Process(job.torchrun.pid)
    assert kill(target, job, RunFiles(tmp_path), moment=Moment(lambda files: True, 0.0))
    assert job.wait(10) == -signal.SIGKILL


def test_a_rank_survives_a_moment_that_has_passed(job, tmp_path):
    conditions = iter([True, False])  # it holds before the delay and not after it

    def condition(files: RunFiles) -> bool:
        holds = next(conditions, None)
        if holds is None:
            job.torchrun.kill()
        return bool(holds)

    assert not kill(psutil.Process(job.torchrun.pid), job, RunFiles(tmp_path), moment=Moment(condition, 0.0))
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
    monkeypatch.setattr(sys, "argv", ["fault_injection", *flags])
    assert run_program(fault_injection.main) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert names in line
