"""Both training paths as a user starts them: what a run leaves behind."""

from __future__ import annotations

import json
import re

import pandas as pd
import pytest
from helpers.architectures import write_model
from transformers import pipeline

import app.ddp_loop
from app.cli import parse_settings
from app.runs.csv_escape import escape
from app.runs.reader import read_run

PATHS = ("ddp_loop", "trainer_run")
TINY = ["--max_length=32", "--train_batch_size=8", "--max_steps=1", "--eval_strategy=no", "--save_strategy=no"]


@pytest.fixture
def fine_tune(world, tmp_path, monkeypatch):
    """Train with app.ddp_loop in this process, whose working directory becomes the test's folder."""

    def run(*flags: str) -> None:
        monkeypatch.chdir(tmp_path)
        app.ddp_loop.fine_tune(parse_settings(arguments=[*TINY, "--use_cpu", "--output_dir=run", *flags]), world)

    return run


def test_a_finished_run_is_a_pipeline_with_class_names(fine_tune, review_csv, tmp_path):
    fine_tune(f"--csv={review_csv(90, classes=('schlecht', 'gut', '=1+1'))}")
    classify = pipeline("text-classification", model=str(tmp_path / "run" / "model"))
    assert {label["label"] for label in classify("好，第3次", top_k=None)} == {"schlecht", "gut", "=1+1"}
    assert (tmp_path / "run" / "model" / "README.md").read_text().startswith("---\n")
    cells = set(pd.read_csv(tmp_path / "run" / "predictions.csv")["label"])
    assert "'=1+1" in cells, "a spreadsheet would run it as a formula"


def test_reviews_and_classes_of_any_kind_are_read_back_from_predictions(fine_tune, tmp_path):
    reviews = [f'好{i}\r第二行, "{i}"\n=1+{i};=HYPERLINK("x")' for i in range(60)]
    classes = ["=a", "'=a", "x;=b"]
    source = pd.DataFrame({"label": [classes[i % 3] for i in range(60)], "review": reviews})
    source.to_csv(tmp_path / "r.csv", index=False)
    fine_tune("--csv=r.csv")
    run = read_run(tmp_path / "run")
    assert run.predictions["review"].tolist() == [escape(reviews[row]) for row in run.predictions["row"]]
    assert run.predictions["label"].tolist() == source["label"].loc[run.predictions["row"]].tolist()
    written = (tmp_path / "run" / "predictions.csv").read_text("utf-8")
    assert not [cell for cell in re.split("[,;\t\r\n]", written) if cell.strip('"').startswith(tuple("=+-@"))]


def test_a_model_folder_without_weights_is_reported(fine_tune, review_csv, tmp_path, capsys):
    write_model(tmp_path / "model", "distilbert")
    fine_tune(f"--csv={review_csv()}", "--model=model")
    assert "no weights" in capsys.readouterr().out


def test_each_run_gets_a_new_folder(world, review_csv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = parse_settings(arguments=[*TINY, "--use_cpu", f"--csv={review_csv()}"])
    for _ in range(2):
        app.ddp_loop.fine_tune(settings, world)
    first, second, latest = sorted((tmp_path / "runs" / "ddp_loop").iterdir())
    assert latest.name == "latest"
    assert latest.resolve() == second.resolve()
    assert [run.metrics["hash"] for run in map(read_run, (first, second))] == [read_run(latest).metrics["hash"]] * 2


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
