"""`app.compare` and its jobs: how many processes they get, and how it reports that one failed."""

from __future__ import annotations

import sys

import pytest
import torch
from helpers.run_folders import write_run

from app import compare
from app.common.errors import RunError
from app.program import run_program
from app.runs.reader import read_run
from app.settings import Settings


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """A function that runs app.compare in this process; returns its exit status and the lines on standard error."""

    def run(*flags: object) -> tuple[int, list[str]]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["compare", *map(str, flags)])
        return run_program(compare.main), capsys.readouterr().err.splitlines()

    return run


@pytest.mark.parametrize(
    ("gpus", "flags", "processes"),
    [(0, [], 2), (4, [], 4), (4, ["--nproc_per_node=3"], 3), (1, ["--nproc_per_node=3", "--use_cpu"], 3)],
)
def test_both_paths_get_the_same_number_of_processes(call, review_csv, tmp_path, monkeypatch, gpus, flags, processes):
    started = []

    def train_path(path_name, settings, nproc_per_node, folder):
        started.append((path_name, nproc_per_node))
        return read_run(write_run(folder, review_csv(), path=path_name))

    monkeypatch.setattr(compare, "train_path", train_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    status, lines = call("--csv", review_csv(), "--train_batch_size", 12, "--no_baselines", *flags)
    assert (status, lines) == (0, [])
    assert started == [("ddp_loop", processes), ("trainer_run", processes)]


def test_a_failed_job_is_named_with_its_files(tmp_path, monkeypatch):
    folder = tmp_path / "comparison" / "trainer_run"
    monkeypatch.setattr(compare, "run_job", lambda *_: 3)
    with pytest.raises(RunError) as error:
        compare.train_path("trainer_run", Settings(), 2, folder=folder)
    assert str(error.value) == f"trainer_run failed with exit status 3; what it has written is in {folder}"


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [(RunError("it failed"), 1, "error: it failed"), (KeyboardInterrupt(), 130, "interrupted: every job that was ")],
)
def test_failures_and_interrupts_are_one_line(call, monkeypatch, error, status, line):
    def train_pairs(*_):
        raise error

    monkeypatch.setattr(compare, "train_pairs", train_pairs)
    found, (shown,) = call()
    assert found == status
    assert shown.startswith(line)
