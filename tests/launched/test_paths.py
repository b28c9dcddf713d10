"""Both roads as a user starts them: real torchrun, real gloo, real reviews where available."""

from __future__ import annotations

import json
import math
import re

import pandas as pd
import pytest
from jobs import read_steps
from sklearn.metrics import accuracy_score
from transformers import pipeline

from app.runs.reader import read_run

pytestmark = pytest.mark.launched
PATHS = ("ddp_loop", "trainer_run")
FILES = {"settings.json", "split.json", "steps.jsonl", "metrics.json", "predictions.csv", "model"}


def without_time(steps):
    return [{name: value for name, value in step.items() if name != "seconds"} for step in steps]


def test_both_roads_are_the_same_training_to_the_bit(launch, hotel_csv, tmp_path):
    flags = ["--gradient_accumulation_steps", 2, "--eval_strategy", "steps", "--eval_steps", 5, "--bf16"]
    for road in PATHS:
        common = ["--csv", hotel_csv, "--max_steps", 12, "--validation_size", 0.1, "--output_dir", road]
        done = launch(f"app.{road}", *common, *flags, ranks=2)
        assert done.status == 0, done.err
    a, b = (tmp_path / road for road in PATHS)
    assert len(read_steps(a)) == 12
    assert without_time(read_steps(a)) == without_time(read_steps(b))
    for file in ("predictions.csv", "model/model.safetensors", "split.json"):
        assert (a / file).read_bytes() == (b / file).read_bytes(), file
    evaluations = [(folder / "evaluations.jsonl").read_text() for folder in (a, b)]
    assert evaluations[0] == evaluations[1]
    lines = [json.loads(line) for line in evaluations[0].splitlines()]
    assert [(line["step"], line["rows"]) for line in lines] == [(step, "validation") for step in (5, 10, 12)]


def test_one_rank_and_two_train_on_the_same_batches(launch, hotel_csv, tmp_path):
    common = ["--csv", hotel_csv, "--max_steps", 30, "--dropout", 0, "--eval_strategy", "no", "--output_dir"]
    assert launch("app.ddp_loop", *common, "two", ranks=2).status == 0
    assert launch("app.trainer_run", *common, "one", ranks=1).status == 0
    one, two = read_steps(tmp_path / "one"), read_steps(tmp_path / "two")
    for alone, raise_on_all_ranks in zip(one, two, strict=True):
        assert (alone["examples"], alone["tokens"]) == (raise_on_all_ranks["examples"], raise_on_all_ranks["tokens"])
        assert alone["loss"] == pytest.approx(raise_on_all_ranks["loss"], rel=1e-4)
        assert alone["grad_norm"] == pytest.approx(raise_on_all_ranks["grad_norm"], rel=1e-2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_each_test_row_is_predicted_once_and_accuracy_is_scikit_learn_s(launch, hotel_csv, tmp_path, ranks):
    road = PATHS[ranks % 2]
    flags = ["--csv", hotel_csv, "--max_steps", 2, "--train_batch_size", 30, "--output_dir", "run"]
    done = launch(f"app.{road}", *flags, ranks=ranks)
    assert done.status == 0, done.err
    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir()} - {"checkpoints", "evaluations.jsonl", ".lock"} == FILES
    metrics, split = (json.loads((folder / f"{name}.json").read_text()) for name in ("metrics", "split"))
    predictions = pd.read_csv(folder / "predictions.csv")
    source = pd.read_csv(hotel_csv)
    n_test = math.ceil(source["review"].notna().sum() * 0.1)  # --test_size
    assert len(predictions) == predictions["row"].nunique() == metrics["n_test"] == split["n_test"] == n_test
    assert predictions["row"].is_monotonic_increasing
    assert metrics["accuracy"] == accuracy_score(predictions["label"], predictions["predicted"])
    assert (source["label"].loc[predictions["row"]].to_numpy() == predictions["label"].to_numpy()).all()
    assert len(metrics["peak_memory_bytes"]) == ranks
    assert json.loads((folder / "evaluations.jsonl").read_text())["n"] == n_test


def test_a_finished_run_is_a_pipeline_with_class_names(launch, review_csv, tmp_path):
    csv = review_csv(90, classes=("schlecht", "gut", "=1+1"))
    done = launch("app.ddp_loop", "--csv", csv, "--max_steps", 2, "--train_batch_size", 8, "--output_dir", "run")
    assert done.status == 0, done.err
    classify = pipeline("text-classification", model=str(tmp_path / "run" / "model"))
    assert {label["label"] for label in classify("好，第3次", top_k=None)} == {"schlecht", "gut", "=1+1"}
    assert (tmp_path / "run" / "model" / "README.md").read_text().startswith("---\n")
    cells = set(pd.read_csv(tmp_path / "run" / "predictions.csv")["label"])
    assert "'=1+1" in cells, "a spreadsheet would run it as a formula"


@pytest.mark.parametrize("road", PATHS)
def test_plain_python_is_a_run_of_one_rank_in_a_new_folder(launch, review_csv, tmp_path, road):
    for _ in range(2):
        flags = ["--csv", review_csv(), "--max_steps", 1, "--train_batch_size", 8, "--eval_strategy", "no"]
        assert launch(f"app.{road}", *flags).status == 0
    runs = sorted((tmp_path / "runs" / road).iterdir())
    assert len(runs) == 3
    assert (tmp_path / "runs" / road / "latest").resolve() in runs
    settings = json.loads((tmp_path / "runs" / road / "latest" / "settings.json").read_text())
    assert (settings["path"], settings["world_size"]) == (road, 1)


def test_a_folder_without_weights_and_labels_that_are_words(launch, review_csv, tmp_path):
    from transformers import DistilBertConfig

    from app.model.tiny_bert import learn_tokenizer

    tokenizer = learn_tokenizer(["好，差。第一次"] * 9)
    tokenizer.save_pretrained(tmp_path / "folder")
    DistilBertConfig(vocab_size=len(tokenizer), dim=32, n_layers=1, n_heads=2).save_pretrained(tmp_path / "folder")
    csv = review_csv(80, classes=("bad", "good"))
    flags = ["--csv", csv, "--model", "folder", "--max_steps", 2, "--train_batch_size", 8]
    outputs = [launch(f"app.{road}", *flags, "--output_dir", road, ranks=2) for road in PATHS]
    assert [done.status for done in outputs] == [0, 0], outputs[0].err + outputs[1].err
    assert "no weights" in outputs[0].out
    a, b = (tmp_path / road for road in PATHS)
    assert (a / "predictions.csv").read_bytes() == (b / "predictions.csv").read_bytes()


MISTAKES = [
    (["--csv", "none.csv"], "none.csv"),
    (["--csv", "one_class.csv"], "one_class.csv"),
    (["--train_batch_size", 33], "--train_batch_size 33"),
    (["--train_batch_size", 4096], "--train_batch_size"),
    (["--lerning_rate", 1], "did you mean --learning_rate"),
    (["--model", "nobody/no-such-model"], "nobody/no-such-model"),
    (["--output_dir", "full"], "full"),
    (["--output_dir", "one_class.csv"], "one_class.csv"),
]


@pytest.mark.parametrize(("flags", "names"), MISTAKES)
def test_a_user_s_mistake_is_one_line_from_one_rank_and_leaves_nothing(launch, review_csv, tmp_path, flags, names):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    pd.DataFrame({"label": [1] * 9, "review": ["好"] * 9}).to_csv(tmp_path / "one_class.csv", index=False)
    data = [] if "--csv" in flags else ["--csv", review_csv()]
    batch = [] if "--train_batch_size" in flags else ["--train_batch_size", 8]
    before = set(tmp_path.rglob("*"))
    done = launch("app.ddp_loop", *data, *batch, "--max_steps", 1, *flags, "--cache_dir", "runs/cache", ranks=2)
    assert done.status == 1, "torchrun's own"
    assert len(done.error_lines) == 1, done.err
    assert names in done.error_lines[0]
    ours = done.err[: done.err.index("torch/distributed")] if "torch/distributed" in done.err else done.err
    assert "Traceback" not in ours.partition("error: ")[0]
    assert "exitcode  : 2" in done.err
    assert done.error_lines[0] in done.err.partition("Root Cause")[2], "our line stands in torchrun's table"
    new = {path.relative_to(tmp_path).parts[0] for path in set(tmp_path.rglob("*")) - before}
    assert new <= {"runs"}
    assert not (tmp_path / "runs" / "ddp_loop").exists()


@pytest.mark.parametrize("road", PATHS)
def test_plain_python_ends_with_status_2_and_no_traceback(launch, review_csv, road):
    done = launch(f"app.{road}", "--csv", review_csv(), "--test_size", 7)
    assert done.status == 2
    assert done.err.splitlines() == done.error_lines
    assert len(done.error_lines) == 1


def test_ranks_that_see_other_rows_are_told_apart(launch, review_csv, tmp_path):
    for rank in range(3):
        (tmp_path / f"node{rank}").mkdir()
        csv = review_csv(60 if rank != 2 else 61)
        csv.rename(tmp_path / f"node{rank}" / "reviews.csv")
    script = tmp_path / "on_nodes.py"
    script.write_text(
        "import os\n"
        "os.chdir(os.path.join(os.environ['ROOT'], 'node' + os.environ['RANK']))\n"
        "from app.cli import launch\n"
        "from app.ddp_loop import main\n"
        "launch(main, None)\n"
    )
    flags = ["--csv", "reviews.csv", "--train_batch_size", 9]
    done = launch(str(script), *flags, ranks=3, ROOT=str(tmp_path))
    assert len(done.error_lines) == 1
    assert "rank(s) 2" in done.error_lines[0]
    (tmp_path / "node1" / "reviews.csv").unlink()
    done = launch(str(script), *flags, ranks=3, ROOT=str(tmp_path))
    assert len(done.error_lines) == 1
    assert "rank 1: " in done.error_lines[0]
    assert "no such file" in done.error_lines[0]


def test_the_help_is_printed_once(launch):
    done = launch("app.ddp_loop", "--help", ranks=2)
    assert done.status == 0, done.err
    assert done.out.count("--train_batch_size ") == 1
    assert done.out.count("torchrun --nproc_per_node=2 -m app.ddp_loop") == 1


def test_nodes_with_other_flags_are_told(launch, review_csv, tmp_path):
    script = tmp_path / "on_nodes.py"
    script.write_text(
        "import os, sys\n"
        "sys.argv += ['--learning_rate', '0.00' + str(1 + int(os.environ['RANK']))]\n"
        "from app.cli import launch\n"
        "from app.ddp_loop import main\n"
        "launch(main, None)\n"
    )
    done = launch(str(script), "--csv", review_csv(), "--train_batch_size", 8, ranks=2)
    assert len(done.error_lines) == 1
    assert "--learning_rate 0.002 (rank 0: 0.001)" in done.error_lines[0]
    assert not (tmp_path / "runs" / "ddp_loop").exists()


def test_reviews_and_classes_of_any_kind_come_back_from_predictions(launch, tmp_path):
    reviews = [f'好{i}\r第二行, "{i}"\n=1+{i};=HYPERLINK("x")' for i in range(60)]
    classes = ["=a", "'=a", "x;=b"]
    source = pd.DataFrame({"label": [classes[i % 3] for i in range(60)], "review": reviews})
    source.to_csv(tmp_path / "r.csv", index=False)
    flags = ["--csv", "r.csv", "--train_batch_size", 8, "--max_steps", 1, "--output_dir", "run"]
    assert launch("app.ddp_loop", *flags).status == 0
    run = read_run(tmp_path / "run")
    assert run.predictions["review"].tolist() == [reviews[row] for row in run.predictions["row"]]
    assert run.predictions["label"].tolist() == source["label"].loc[run.predictions["row"]].tolist()
    written = (tmp_path / "run" / "predictions.csv").read_text("utf-8")
    assert not [cell for cell in re.split("[,;\t\r\n]", written) if cell.strip('"').startswith(tuple("=+-@"))]
