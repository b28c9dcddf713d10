"""Both training paths as a user starts them: what a run leaves behind."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest
from helpers.jobs import SAMPLE_CSV
from safetensors.torch import load_file

import app.ddp_loop
from app.cli import parse_settings
from app.runs.csv_escape import escape
from app.runs.reader import read_run

PATHS = ("ddp_loop", "trainer_run")
TINY = ["--max_length=32", "--train_batch_size=8", "--max_steps=1", "--eval_strategy=no", "--save_strategy=no"]


def test_reviews_and_classes_of_any_kind_are_read_back_from_predictions(world, tmp_path, monkeypatch):
    reviews = [f'好{i}\r第二行, "{i}"\n=1+{i};=HYPERLINK("x")' for i in range(60)]
    classes = ["=a", "'=a", "x;=b"]
    source = pd.DataFrame({"label": [classes[i % 3] for i in range(60)], "review": reviews})
    source.to_csv(tmp_path / "r.csv", index=False)
    monkeypatch.chdir(tmp_path)
    app.ddp_loop.fine_tune(parse_settings([*TINY, "--use_cpu", "--csv=r.csv", "--output_dir=run"]), world)
    run = read_run(tmp_path / "run")
    assert run.predictions["review"].tolist() == [escape(reviews[row]) for row in run.predictions["row"]]
    assert run.predictions["label"].tolist() == source["label"].loc[run.predictions["row"]].tolist()
    written = (tmp_path / "run" / "predictions.csv").read_text("utf-8")
    assert not [cell for cell in re.split("[,;\t\r\n]", written) if cell.strip('"').startswith(tuple("=+-@"))]


@pytest.mark.launched
@pytest.mark.parametrize("path_name", ["ddp_loop", pytest.param("trainer_run", marks=pytest.mark.slow)])
def test_plain_python_is_a_run_of_one_rank_in_a_new_folder(launch, review_csv, tmp_path, path_name):
    done = launch(path_name, "--csv", review_csv(), *TINY)
    assert done.status == 0, done.out + done.err
    assert "(AdamW, linear schedule)" in done.out
    assert "/1 [" not in done.err, "a progress bar has been written to a file"
    runs = sorted((tmp_path / "runs" / path_name).iterdir())
    assert len(runs) == 2, runs
    assert (tmp_path / "runs" / path_name / "latest").resolve() in runs
    settings = json.loads((tmp_path / "runs" / path_name / "latest" / "settings.json").read_text())
    assert (settings["path"], settings["world_size"]) == (path_name, 1)


# ---- faults, and machines with GPUs ----------------------------------------------------------------------------------

FAULTY = str(Path(__file__).with_name("faulty.py"))
SMALL = ("--csv", SAMPLE_CSV, "--train_batch_size", 8, "--max_length", 32, "--max_steps", 3, "--threads", 1)


@pytest.mark.launched
@pytest.mark.slow
@pytest.mark.parametrize("path_name", PATHS)
@pytest.mark.parametrize(
    ("fault", "variables"),
    # The signal comes in the only evaluation, after all steps.
    [("simulate_gpus", {"GPUS": "1,1"}), ("signal_in_evaluation", {"SIGNAL": "SIGTERM"})],
)
def test_a_cpu_run_finishes_although_the_gpus_are_full_or_it_is_asked_to_stop_at_its_end(
    launch, tmp_path, path_name, fault, variables
):
    flags = [*SMALL, "--use_cpu", "--bf16", "--eval_strategy", "no", "--test_size", 0.02, "--eval_batch_size", 4]
    flags += ["--model", "tiny-bert", "--output_dir", "run"]
    done = launch(FAULTY, path_name, fault, *flags, ranks=2, **variables)
    assert (done.status, done.error_lines) == (0, []), done.err
    read_run(tmp_path / "run")


@pytest.mark.gpu
@pytest.mark.launched
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_deterministic_runs_of_both_paths_have_the_same_weights_on_a_gpu(launch, tmp_path, precision):
    runs = [("a", "ddp_loop"), ("b", "ddp_loop"), ("c", "trainer_run")]
    for name, path_name in runs:
        flags = [*SMALL, "--max_steps", 20, "--deterministic", "--precision", precision, "--output_dir", name]
        done = launch(path_name, *flags, ranks=1)
        assert done.status == 0, done.err
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name, _ in runs]
    for other in weights[1:]:
        assert all(other[name].equal(tensor) for name, tensor in weights[0].items())
