"""Both training paths as a user starts them: runs that finish, and mistakes that end in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest
from helpers.architectures import write_model
from helpers.jobs import TrainingRun, write_reviews
from transformers import pipeline

import app.ddp_loop
from app.cli import parse_settings
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
    assert run.predictions["review"].tolist() == [reviews[row] for row in run.predictions["row"]]
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
    runs = sorted((tmp_path / "runs" / path_name).iterdir())
    assert len(runs) == 2, runs
    assert (tmp_path / "runs" / path_name / "latest").resolve() in runs
    settings = json.loads((tmp_path / "runs" / path_name / "latest" / "settings.json").read_text())
    assert (settings["path"], settings["world_size"]) == (path_name, 1)


MISTAKES = {
    "--csv=none.csv": "none.csv",
    "--csv=one_class.csv": "one_class.csv",
    "--train_batch_size=30": "--train_batch_size 30",
    "--train_batch_size=4096": "--train_batch_size",
    "--lerning_rate=1": "did you mean --learning_rate",
    "--model=nobody/no-such-model": "nobody/no-such-model",
    "--output_dir=full": "full",
    "--output_dir=one_class.csv": "one_class.csv",
}


MISTAKES_OF_SOME_RANKS = {
    "--csv=other-rows-{rank}.csv": "rank(s) 2",
    "--csv=missing-on-one-{rank}.csv": "rank 1: ",
    "--learning_rate=0.00{rank}1": "--learning_rate 0.0011 (rank 0: 0.0001)",
}
# A rank that did not raise the error would be waited for.
SHARED_RUNS = {
    "four_ranks": {
        f"{number}-{path}": TrainingRun(path, ["--csv=reviews.csv", *TINY, flag])
        for number, flag in enumerate(MISTAKES | MISTAKES_OF_SOME_RANKS)
        for path in PATHS
    }
}


def write_inputs(folder: Path, csv: Path) -> None:
    write_mistakes(folder)
    write_reviews(folder / "reviews.csv", 90)
    for rank in range(4):
        write_reviews(folder / f"other-rows-{rank}.csv", 90 if rank != 2 else 91)
        if rank != 1:
            write_reviews(folder / f"missing-on-one-{rank}.csv", 90)


def write_mistakes(folder: Path) -> None:
    (folder / "full").mkdir()
    (folder / "full" / "something").touch()
    pd.DataFrame({"label": [1] * 9, "review": ["好"] * 9}).to_csv(folder / "one_class.csv", index=False)


@pytest.mark.launched
@pytest.mark.parametrize(
    ("path_name", "flag"),
    [
        ("ddp_loop", "--csv=one_class.csv"),
        pytest.param("trainer_run", "--lerning_rate=1", marks=pytest.mark.slow),
    ],
)
def test_a_mistake_ends_a_job_with_one_line_from_one_rank(launch, review_csv, tmp_path, path_name, flag):
    write_mistakes(tmp_path)
    before = set(tmp_path.rglob("*"))
    done = launch(path_name, "--csv", review_csv(), *TINY, "--cache_dir", "cache", flag, ranks=2)
    assert done.status == 1, "torchrun's own status"
    assert len(done.error_lines) == 1, done.err
    assert MISTAKES[flag] in done.error_lines[0]
    ours = done.err[: done.err.index("torch/distributed")] if "torch/distributed" in done.err else done.err
    assert "Traceback" not in ours.partition("error: ")[0]
    assert "exitcode  : 2" in done.err
    assert done.error_lines[0] in done.err.partition("Root Cause")[2], "torchrun's summary contains the line"
    new = {path.relative_to(tmp_path).parts[0] for path in set(tmp_path.rglob("*")) - before}
    assert new <= {"cache", "reviews.csv"}


@pytest.mark.launched
def test_a_mistake_on_any_rank_is_raised_on_all_and_leaves_nothing(trained_by, shared_folder, tmp_path, hotel_csv):
    outcomes = trained_by("four_ranks")
    for number, named in enumerate((MISTAKES | MISTAKES_OF_SOME_RANKS).values()):
        for path in PATHS:
            problem = outcomes[f"{number}-{path}"].problem
            assert problem is not None
            assert problem.startswith(("AgreedError: ", "UserError: "))
            assert named in problem
            assert len(problem.splitlines()) == 1
    write_inputs(tmp_path, hotel_csv)
    inputs = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}
    paths = {path.relative_to(shared_folder) for path in shared_folder.rglob("*")}
    assert {path.parts[0] for path in paths - inputs} <= {"cache", "hub"}


@pytest.mark.launched
@pytest.mark.slow
def test_the_help_is_printed_once(launch):
    done = launch("ddp_loop", "--help", ranks=2)
    assert done.status == 0, done.err
    assert done.out.count("--train_batch_size ") == 1
    assert done.out.count("torchrun --standalone --nproc_per_node=2 -m app.ddp_loop") == 1
