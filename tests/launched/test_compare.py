"""`python -m app.compare` as a user starts it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from jobs import PROJECT, SAMPLE_CSV, end_processes, processes_of

from app.compare import main

pytestmark = pytest.mark.launched
SHORT = ["--csv", SAMPLE_CSV, "--max_steps", 3, "--eval_strategy", "no"]


def test_it_trains_on_both_roads_and_finds_no_difference(launch, tmp_path):
    done = launch("app.compare", *SHORT)
    assert done.status == 0, done.err
    (folder,) = {path.resolve() for path in (tmp_path / "runs" / "comparisons").iterdir()}
    comparison = json.loads((folder / "comparison.json").read_text())
    assert [run["path"] for run in comparison["runs"]] == ["ddp_loop", "trainer_run"]
    assert [run["world_size"] for run in comparison["runs"]] == [2, 2]
    assert comparison["first_differing_step"] is None
    assert comparison["max_loss_difference"] == 0
    assert comparison["same_predictions"]
    assert comparison["disagreements"] == []
    assert "itwise identical" in done.out
    assert (folder / "comparison.md").read_text().partition("## Misclassified by both")[0] in done.out

    again = launch("app.compare", folder / "ddp_loop", folder / "trainer_run", "--output_dir", "again")
    assert again.status == 0, again.err
    assert json.loads((tmp_path / "again" / "comparison.json").read_text())["first_differing_step"] is None


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory) -> Path:
    """Two short runs of ddp_loop that differ in the learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    for name, rate in (("a", "1e-3"), ("b", "5e-2")):
        flags = [*map(str, SHORT), "--learning_rate", rate, "--output_dir", name]
        command = [sys.executable, "-m", "app.ddp_loop", *flags]
        subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(PROJECT)}, check=True, timeout=150)
    return folder


def test_runs_that_differ_are_told_apart_with_the_reviews_they_disagree_on(launch, two_runs, tmp_path):
    done = launch("app.compare", two_runs / "a", two_runs / "b", "--output_dir", "out")
    assert done.status == 0, done.err
    comparison = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert comparison["first_differing_step"] == 3, "the rate of step 1 is 0, so step 2 is the first to change weights"
    assert comparison["max_loss_difference"] > 0


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """Runs app.compare in this process; returns its exit status and the lines on standard error."""

    def run(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["compare", *map(str, arguments)])
        return main(), capsys.readouterr().err.splitlines()

    return run


def damaged(two_runs: Path, tmp_path: Path, file: str, change) -> Path:
    copy = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
    shutil.copytree(two_runs / "a", copy)
    change(copy / file)
    return copy


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("file", "change"),
    [
        *(
            (name, Path.unlink)
            for name in ("settings.json", "split.json", "metrics.json", "predictions.csv", "steps.jsonl")
        ),
        ("model/model.safetensors", cut),
        ("steps.jsonl", lambda path: path.write_text(path.read_text().replace('"loss": 0', '"loss": null, "x": 0', 1))),
        *((name, cut) for name in ("settings.json", "split.json", "metrics.json", "predictions.csv", "steps.jsonl")),
        ("metrics.json", lambda path: path.write_text("[]")),
        ("steps.jsonl", lambda path: path.write_bytes(path.read_bytes().partition(b"\n")[2])),
        ("predictions.csv", lambda path: path.write_text(path.read_text().replace(',"0","', ',"1","', 5))),
    ],
)
def test_a_damaged_run_is_one_line_that_names_the_file(compare, two_runs, tmp_path, file, change):
    copy = damaged(two_runs, tmp_path, file, change)
    status, lines = compare(copy, two_runs / "b")
    assert (status, len(lines)) == (2, 1)
    assert str(copy / file) in lines[0]
    assert not (tmp_path / "runs").exists()


def test_other_splits_and_wrong_calls_are_one_line(compare, two_runs, tmp_path):
    other = damaged(
        two_runs, tmp_path, "split.json", lambda p: p.write_text(p.read_text().replace('gerprint": "', 'gerprint": "f'))
    )
    for runs in (
        [other, two_runs / "b"],
        [two_runs / "a"],
        [two_runs / "none", two_runs / "b"],
        ["--nproc_per_node", 0],
    ):
        status, lines = compare(*runs)
        assert (status, len(lines)) == (2, 1), runs
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_everything_that_was_started(tmp_path, how):
    mark = f"interrupt-{os.getpid()}-{how.name}"
    command = [sys.executable, "-m", "app.compare", "--csv", str(SAMPLE_CSV), "--num_train_epochs", "50"]
    variables = os.environ | {"PYTHONPATH": str(PROJECT), "SAMEBITS_TEST_JOB": mark}
    with subprocess.Popen(command, cwd=tmp_path, env=variables, stderr=subprocess.PIPE, text=True) as job:
        deadline = time.monotonic() + 100
        while not list(tmp_path.rglob("steps.jsonl")):  # until it trains
            assert time.monotonic() < deadline
            assert job.poll() is None
            psutil.wait_procs([], timeout=0.2)
        assert len(processes_of(mark)) >= 4, "compare, torchrun, two ranks"
        job.send_signal(how)
        _, err = job.communicate(timeout=60)
    assert job.returncode == 130
    assert "interrupted" in err
    assert end_processes(mark) == []
