"""Predictions with a trained model."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest
from helpers.architectures import SMALL, write_model
from helpers.jobs import write_reviews
from helpers.run_folders import edit_json
from safetensors.torch import load_file, save_file
from sklearn.metrics import f1_score
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    RoCBertConfig,
    RoCBertTokenizer,
    pipeline,
)

from app import ddp_loop, trainer_run
from app import predict as program
from app.cli import parse_settings
from app.common.errors import RunError, UserError
from app.runs.reader import read_run

FLAGS = ["--max_length=32", "--train_batch_size=8", "--max_steps=1", "--eval_strategy=no", "--save_strategy=no"]
FLAGS += ["--use_cpu", "--threads=1", "--output_dir=run", "--eval_batch_size=4", "--test_size=0.4"]


def train(world, *flags: str, path=ddp_loop) -> None:
    path.fine_tune(parse_settings([*FLAGS, *flags]), world)


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory):
    """A folder with `reviews.csv`, a run on them, and models that have something wrong with them."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_reviews(folder / "reviews.csv", 60, ("schlecht", "gut"))
        train(world, "--csv=reviews.csv")
    pd.DataFrame({"label": ["gut", "差"] * 20, "review": ["好"] * 40}).to_csv(folder / "wrong.csv", index=False)
    AutoModel.from_config(AutoConfig.from_pretrained(folder / "run/model")).save_pretrained(folder / "headless")
    AutoTokenizer.from_pretrained(folder / "run/model").save_pretrained(folder / "headless")
    t5 = write_model(folder / "t5", "t5")  # its config has another end-of-sequence token than its tokenizer
    AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(t5)).save_pretrained(t5)
    changes = {"regression": {"problem_type": "regression"}, "reshaped": {"id2label": dict(enumerate("abc"))}}
    for name, changed in (changes | {"renamed": {}}).items():
        shutil.copytree(folder / "run/model", folder / name)
        edit_json(folder / name / "config.json", **changed)
    weights = load_file(folder / "renamed/model.safetensors")
    weights |= {name.replace("classifier", "outputs"): weights.pop(name) for name in [*weights] if "classifier" in name}
    save_file(weights, folder / "renamed/model.safetensors", metadata={"format": "pt"})
    pd.DataFrame({"review": ["好"]}).to_csv(folder / "unlabeled.csv", index=False)
    (folder / "settings.yaml").write_text("label_column: label\n")
    shutil.copytree(folder / "run", folder / "gone")
    edit_json(folder / "gone/settings.json", csv="gone.csv")
    (folder / "unfinished").mkdir()
    shutil.copy(folder / "run/settings.json", folder / "unfinished")
    return folder


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(trained):
    """A finished run in `run/` of the current folder, a copy of `trained`."""
    shutil.copytree(trained, ".", dirs_exist_ok=True)
    return Path("run")


@pytest.fixture
def predict(world, monkeypatch, capsys):
    """Run app.predict in this process: `predict("run", "--split=test")` returns what it prints."""

    def call(*arguments: str, typed: str = "") -> str:
        monkeypatch.setattr(sys, "argv", ["predict", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
        own = program.PROGRAM.parse(arguments)[1]
        capsys.readouterr()
        task = program.define_task(own["run_or_model"], own["texts"], part=own["split"], output=own["output"])
        program.predict(task, world)
        printed = capsys.readouterr()
        call.warnings = printed.err
        return printed.out

    return call


@pytest.fixture
def gives_the_runs_file(predict):
    """Whether predicting the test rows again gives the predictions.csv of `run`, byte for byte."""

    def gives(*arguments: str, model: str = "run") -> bool:
        printed = predict(model, "--split=test", "--output=again.csv", *arguments)
        accuracy = json.loads(Path("run/metrics.json").read_text())["accuracy"]
        same_bytes = Path("again.csv").read_bytes() == Path("run/predictions.csv").read_bytes()
        return same_bytes and f"accuracy  {accuracy:.4f} (" in printed

    return gives


@pytest.mark.parametrize("model", ["run", "run/model"])
def test_predicting_the_test_rows_gives_the_runs_file(run, gives_the_runs_file, model):
    assert gives_the_runs_file(model=model), "with the settings of the run"


def test_a_file_that_appears_while_rows_are_predicted_is_kept(run, predict, monkeypatch):
    def create_the_output(*arguments, **options):
        Path("o.csv").write_text("precious")
        return ddp_loop.evaluate(*arguments, **options)

    monkeypatch.setattr(program, "evaluate", create_the_output)
    with pytest.raises(RunError, match=r"o\.csv: has been created meanwhile"):
        predict("run", "--split=test", "--output=o.csv")
    assert Path("o.csv").read_text() == "precious"


def test_predictions_of_texts_from_anywhere_are_those_of_a_plain_pipeline(run, predict):
    texts = [*pd.read_csv(run / "predictions.csv")["review"], "好，差。" * 40, "=1+1"]  # one is cut
    printed = predict("run", "--use_cpu", *texts)
    classify = pipeline("text-classification", model=str(run / "model"), top_k=None, device="cpu", dtype="float32")
    rows = pd.read_csv(io.StringIO(printed))
    assert list(rows.columns) == ["row", "predicted", "probability_gut", "probability_schlecht", "review"]
    for row, scores in zip(rows.to_dict("records"), classify(texts, truncation=True), strict=True):
        assert row["predicted"] == scores[0]["label"]
        for score in scores:
            assert row[f"probability_{score['label']}"] == pytest.approx(score["score"], rel=1e-4)
    assert rows["review"].tolist() == [*texts[:-1], "'=1+1"], "a spreadsheet would run it as a formula"

    lines = "\n\n".join(texts)
    assert predict("run", typed=lines) == printed
    assert predict("run", typed=f"\ufeff{lines}\n") == printed, "a byte order mark is no text"
    pd.DataFrame({"id": range(len(texts) + 1), "review": [*texts, ""]}).to_csv("new.csv", index=False)
    shown = predict("run", "--csv=new.csv")
    assert Path("new-predictions.csv").read_text() == printed
    assert "dropped 1 of" in shown
    assert "accuracy" not in shown
    assert "probability_good" in predict("run", "好", "--label_names=gut=good"), "names are also given afterwards"


def write_rocbert() -> Path:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"差好"]
    Path("vocab.txt").write_text("\n".join(words), "utf-8")
    Path("ids.json").write_text(json.dumps({word: index for index, word in enumerate(words)}), "utf-8")
    RoCBertTokenizer("vocab.txt", "ids.json", "ids.json").save_pretrained("roc_bert")
    sizes = dict.fromkeys(("vocab_size", "shape_vocab_size", "pronunciation_vocab_size"), len(words))
    RoCBertConfig(**SMALL, **sizes, initializer_range=0.5).save_pretrained("roc_bert")
    return Path("roc_bert")


@pytest.mark.parametrize(
    ("name", "changes", "words", "warning"),
    [
        ("bert", {"num_hidden_layers": 1}, 200, "unused weights: bert.encoder.layer.1"),  # more than --max_length
        ("bert", {}, 255, "1 reviews have 512 tokens, to which longer ones are cut"),
        ("fnet", {}, 20, "its logits depend on how far a batch is padded"),
        ("gpt2", {}, 20, ""),  # its config has another padding token than its tokenizer
        ("gpt2", {"pad_token_id": None}, 20, ""),  # its tokenizer has none, and appends the end-of-sequence token
        ("bart", {"eos_token_id": 3}, 20, ""),  # it reads the last end of a text, which may have several
        ("roc_bert", {}, 20, ""),  # its tokenizer returns more inputs than it lists
    ],
)
def test_predictions_of_a_model_folder_are_those_of_a_plain_pipeline(predict, name, changes, words, warning):
    path = write_rocbert() if name == "roc_bert" else write_model(Path(name), name)
    AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(path)).save_pretrained(path)
    edit_json(path / "config.json", **changes)
    edit_json(path / "tokenizer_config.json", **({"pad_token": None} if "pad_token_id" in changes else {}))
    texts = ["好 " * words + "差 " * words, "差", "差[SEP]好"][: 1 if name == "fnet" else 3]
    rows = pd.read_csv(io.StringIO(predict(name, *texts)))
    assert warning in predict.warnings
    assert ("warning: " in predict.warnings) is (warning != "")
    classify = pipeline("text-classification", model=name, device="cpu")
    for row, scores in zip(rows.to_dict("records"), map(classify, texts), strict=True):
        assert row[f"probability_{scores[0]['label']}"] == pytest.approx(scores[0]["score"], rel=1e-5)  # fp32


def test_rows_without_a_label_are_predicted_but_not_counted(run, predict):
    frame = pd.DataFrame({"label": ["gut", " ", "schlecht"], "review": ["好" * 20 + "我们都说"] * 3})
    frame.to_csv("new.csv", index=False, encoding="gb18030")
    assert "(1 of 2 rows)" in predict("run", "--csv=new.csv", "--output=o.csv")
    assert predict.warnings == "new.csv: read as gb18030\n"
    assert pd.read_csv("o.csv")["label"].fillna("-").tolist() == ["gut", "-", "schlecht"]
    predict("run", "我们都说好" * 600)
    assert "1 reviews have" in predict.warnings


def test_a_terminal_gets_no_control_characters(run, predict, monkeypatch):
    assert "a\x1b[31m" in predict("run", typed="a\x1b[31m\n")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    printed = predict("run", typed="a\x1b[31m\n")
    assert "\x1b" not in printed
    assert len(printed.splitlines()) == 2


@pytest.mark.parametrize("flags", [["--csv={}/train.csv", "--test_file={}/test.csv"], ["--dataset_name={}"]])
def test_the_files_of_a_run_may_have_moved(world, gives_the_runs_file, flags):
    Path("data").mkdir()
    write_reviews(Path("data/train.csv"), 60)
    write_reviews(Path("data/test.csv"), 20)
    train(world, *(flag.format("data") for flag in flags), "--test_size=0.1")
    Path("data").rename("moved")
    assert gives_the_runs_file(*(flag.format("./moved") for flag in flags))


@pytest.mark.parametrize("path", [ddp_loop, trainer_run])
def test_f1_is_that_of_the_class_that_is_named_wherever_it_is_printed(world, predict, capsys, path):
    write_reviews(Path("reviews.csv"), 60)
    flags = ["--label_names=0=bad,1=good", "--positive_class=0", "--eval_strategy=epoch"]
    train(world, "--csv=reviews.csv", *flags, path=path)
    printed, run = capsys.readouterr().out, read_run(Path("run"))
    labels_and_predicted = run.predictions[["label", "predicted"]].T.to_numpy()
    f1 = {name: f1_score(*labels_and_predicted, pos_label=name) for name in ("bad", "good")}
    assert run.metrics["f1"] == run.evaluations[-1]["f1"] == f1["bad"] != f1["good"]
    shown = {name: f"F1 (class {name}) {value:.4f}" for name, value in f1.items()}
    assert shown["bad"] in printed
    assert shown["bad"] in predict("run", "--split=test", "--output=as-trained.csv")
    assert shown["good"] in predict("run", "--split=test", "--output=other.csv", "--positive_class=good")


def test_named_classes_are_in_the_model_and_in_all_predictions(world, predict, gives_the_runs_file):
    write_reviews(Path("reviews.csv"), 60)
    names = "--label_names=0=负面,1=正面"
    train(world, "--csv=reviews.csv", names)
    assert AutoConfig.from_pretrained("run/model").id2label == {0: "负面", 1: "正面"}
    assert read_run(Path("run")).split["classes"] == ["负面", "正面"]
    assert gives_the_runs_file()
    with pytest.raises(UserError, match="--label_names: the run in run was trained with --label_names"):
        predict("run", "好", "--label_names=0=正面,1=负面")
    predict("run", "--csv=reviews.csv", "--output=run.csv")
    Path("run/model").rename("model")
    predict("model", "--csv=reviews.csv", "--output=model.csv", names, "--max_length=32", "--eval_batch_size=4")
    assert Path("run.csv").read_bytes() == Path("model.csv").read_bytes()
    assert set(pd.read_csv("run.csv")["label"]) == {"负面", "正面"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny", "a"], "`tiny` is untrained"),
        (["run", "--csv=wrong.csv"], "row 1: label '差' is not a class of the model, which has 'gut', 'schlecht'"),
        (["run", "好", "--label_names=2=good"], "different names to classes of the model, which has 'gut', 'schlecht'"),
        (["run", "--csv=reviews.csv", "--output=no/o.csv"], "cannot be written: No such file or directory"),
        (["run", "--csv=reviews.csv", "--positive_class=x"], "x: is not one of two classes: 'gut', 'schlecht'"),
        (["run", "--csv=reviews.csv", "--test_file=reviews.csv"], "--test_file: allowed only with --split"),
        (["run", "--split=test", "--csv=wrong.csv"], "its files have changed since the run split them"),
        (["run", "--split=test", "--csv=a.csv", "--dataset_name=b"], "--dataset_name and --csv exclude each other"),
        (["headless", "--split=test"], "is not the folder of a run"),
        (["headless", "a"], "is not a trained classifier: it has no head.dense.weight that fits its config; train it"),
        (["renamed", "a"], "it has no classifier.weight that fits its config, but outputs.bias and 1 more"),
        (["reshaped", "a"], "it has no classifier.weight that fits its config; train it first"),
        (["t5", "好"], "needs its end-of-sequence token (id 1) at least once per text, unlike in row 0"),
        (["run", "好", "--positive_class=gut"], "--positive_class: only rows with labels have an F1"),
        (["run", "a", "--max_length=100000"], "accepts at most"),
        (["run", "\udcff"], "a text is not valid UTF-8"),
        (["run", "好", " "], "a text is empty"),
        (["run", "a", "--output="], "--output .: exists"),
        (["run", "--split=test", "--output=reviews.csv"], "--output reviews.csv: exists"),
        (["regression", "a"], "is not a classifier that predicts one of several classes"),
        ([f"{'x' * 300}/model", "a"], "no such folder"),
        (["run", f"--csv={'x' * 300}.csv"], "File name too long"),
        (["gone", "--split=test"], "gone.csv: no such file"),
        (["run", "--csv=unlabeled.csv", "--label_column=label"], "no column 'label'"),
        (["run", "--csv=unlabeled.csv", "--config=settings.yaml"], "no column 'label'"),
        (["run", "--split=test", f"--output={'x' * 300}.csv"], "name too long"),
        (["unfinished", "a"], "metrics.json: missing: the run has not finished"),
    ],
)
def test_a_mistake_is_one_line(run, predict, arguments, message):
    with pytest.raises(UserError) as caught:
        predict(*arguments)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
