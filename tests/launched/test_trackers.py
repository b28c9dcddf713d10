"""TensorBoard changes no bit of a run, and gets its values in full precision."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from helpers.jobs import SAMPLE_CSV, read_steps, unavailable, write_subset

import app.ddp_loop
from app.cli import parse_settings
from app.runs.schema import METRICS, TRACKERS

pytestmark = [pytest.mark.launched, pytest.mark.slow]
FLAGS = ["--csv=reviews.csv", "--train_batch_size=16", "--max_length=16", "--max_steps=6", "--logical_ranks=2"]
FLAGS += ["--use_cpu", "--threads=1", "--disable_tqdm", "--logging_steps=4", "--eval_strategy=steps", "--eval_steps=3"]


def read_events(folder: Path) -> dict[tuple[str, int], float]:
    """The values that TensorBoard has of a run, by name and step."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    values = {}
    for file in sorted((folder / TRACKERS / "tensorboard").glob("events.*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.tag.startswith(("train/", "eval/", "final/")):
                    assert (value.tag, event.step) not in values, "logged twice"
                    values[value.tag, event.step] = make_ndarray(value.tensor).item()
    return values


def test_all_values_are_logged_and_the_bits_are_those_of_a_run_without_tracker(launch, world, tmp_path, monkeypatch):
    if importlib.util.find_spec("tensorboard") is None:
        unavailable("TensorBoard is not installed: run bash run_scripts/setup.sh")
    write_subset(SAMPLE_CSV, tmp_path / "reviews.csv", 120)
    monkeypatch.chdir(tmp_path)
    app.ddp_loop.fine_tune(parse_settings([*FLAGS, "--output_dir=untracked"]), world)
    expected = json.loads((tmp_path / "untracked" / METRICS.name).read_text())["hash"]
    run = tmp_path / "run"
    done = launch("trainer_run", *FLAGS, "--report_to=tensorboard", "--output_dir=run", ranks=2)
    assert done.status == 0, done.err
    metrics = json.loads((run / METRICS.name).read_text())
    assert metrics["hash"] == expected
    logged = read_events(run)
    for step in read_steps(run):
        number = step.pop("step")
        assert {name: logged[f"train/{name}", number] for name in step} == step
    assert logged["eval/accuracy", 6] == metrics["accuracy"] == logged["final/accuracy", 6]
