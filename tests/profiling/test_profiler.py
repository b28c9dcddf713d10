"""`--profile` in a run of one process: its files, and that it is all or nothing."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import app.ddp_loop
from app.cli import parse_settings
from app.common.errors import RunError
from app.profiling import profiler
from app.profiling.breakdown import CATEGORIES, EXPOSED
from app.report.bitwise import first_difference
from app.runs.reader import read_run

FLAGS = ["--max_length=16", "--train_batch_size=8", "--eval_strategy=no", "--save_strategy=no", "--use_cpu"]


@pytest.fixture
def train(world, review_csv, tmp_path, monkeypatch):
    """Train with app.ddp_loop in this process: `train("name", "--profile=2")` returns the folder of the profile."""
    monkeypatch.chdir(tmp_path)
    csv = review_csv(90)

    def run(name, *flags):
        arguments = [*FLAGS, f"--csv={csv}", f"--output_dir={name}", *flags]
        app.ddp_loop.fine_tune(parse_settings(arguments=arguments), world)
        return tmp_path / name / "profile"

    return run


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_a_profile_has_a_trace_and_a_summary_and_changes_no_result(train, capsys, strategy):
    flags = ["--max_steps=7", f"--strategy={strategy}"]
    plain, folder = train("plain", *flags), train("profiled", *flags, "--profile=2")
    assert first_difference(read_run(plain.parent), read_run(folder.parent)) is None
    assert not plain.exists()
    assert {path.name for path in folder.iterdir()} == {"trace-rank0.json.gz", "summary.json", "summary.md"}
    with gzip.open(folder / "trace-rank0.json.gz") as file:
        assert {"micro-batch", "aten::addmm"} <= {event["name"] for event in json.load(file)["traceEvents"]}
    summary = summary_of(folder)
    assert summary["steps"] == [5, 6]
    (steps,) = summary["ranks"]
    for step in steps:
        assert sum(step[name] for name in CATEGORIES) == pytest.approx(step["step"])
        assert min(step[name] for name in CATEGORIES if name != EXPOSED) > 0, "the strategy marks each part"
    table = (folder / "summary.md").read_text().removeprefix("```\n").removesuffix("\n```\n")
    assert table in capsys.readouterr().out


def test_a_profile_that_would_outlast_the_run_ends_with_it_or_is_reported_as_not_done(train, capsys):
    assert summary_of(train("long", "--max_steps=6", "--profile=100"))["steps"] == [5, 6]
    assert not train("short", "--max_steps=4", "--profile=1").exists()
    assert "--profile: not done, as the run ends before step 5" in capsys.readouterr().out


def test_a_run_that_fails_leaves_no_profile_and_its_resumption_writes_one(train):
    saving = ["--save_strategy=steps", "--save_steps=3", "--max_steps=9", "--profile=3"]
    train_step = app.ddp_loop.train_step

    def fail_in_step_6(wrapped, batches, step, **arguments):
        if step == 5:
            raise RuntimeError("the step fails")
        return train_step(wrapped, batches, step, **arguments)

    with patch.object(app.ddp_loop, "train_step", fail_in_step_6), pytest.raises(RuntimeError, match="the step fails"):
        train("run", *saving)
    assert not list(Path("run").glob("*profile*"))
    assert not torch.autograd._profiler_enabled()
    shutil.copytree("run", "copy")  # this process still holds the lock of the other folder
    assert summary_of(train("copy", *saving, "--resume_from_checkpoint=auto"))["steps"] == [8, 9]


def test_a_profile_that_cannot_be_written_does_not_end_the_run(train, capsys):
    flags = ["--max_steps=6", "--profile=1"]
    full = patch.object(profiler.profile, "export_chrome_trace", side_effect=OSError(28, "No space left on device"))
    with full:
        assert not (train("continues", *flags) / "summary.json").exists()
    assert "No space left on device; training continues (--on_save_failure continue)" in capsys.readouterr().out
    with full, pytest.raises(RunError, match="No space left on device"):
        train("stops", *flags, "--on_save_failure=stop")
