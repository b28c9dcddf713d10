"""Damaged or inconsistent run folders are rejected with a one-line error that names the file."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from helpers.run_folders import edit_json, write_run

from app.common.errors import UserError
from app.runs.reader import read_run
from app.runs.schema import METRICS, PREDICTIONS, SETTINGS, SPLIT, STEPS, probability_column


@pytest.fixture
def run(review_csv, tmp_path):
    return write_run(tmp_path / "run", review_csv())


@pytest.mark.parametrize(
    ("file", "key", "values"),
    [
        (METRICS, "accuracy", (float("nan"), "0.9", None, [], 0.25)),
        (METRICS, "n_test", (0, 3, None)),
        (SPLIT, "classes", (None, 3, ["0"], [0, 1])),
        (SPLIT, "fingerprint", (None,)),
        (SETTINGS, "world_size", (None,)),
    ],
)
def test_a_value_that_does_not_fit_is_one_line(run, file, key, values):
    for value in values:
        edit_json(run / file, **{key: value})
        with pytest.raises(UserError, match=r"\.(json|csv): ") as problem:
            read_run(run)
        assert "\n" not in str(problem.value)


def test_optional_values_may_be_missing_or_null(run):
    edit_json(run / METRICS.name, mfu=None, padding_fraction=None)
    edit_json(run / SETTINGS.name, cache_dir=None, anything=[None, {"at": 1.5}])
    assert read_run(run).metrics["mfu"] is None


@pytest.mark.parametrize("change", ["cut", "missing", "repeated"])
def test_a_damaged_log_is_named(run, change):
    file = run / STEPS
    lines = file.read_text().splitlines(keepends=True)
    changed = {"cut": [*lines[:-1], lines[-1][:5]], "missing": lines[:1] + lines[2:], "repeated": [*lines, lines[-1]]}
    file.write_text("".join(changed[change]))
    with pytest.raises(UserError, match=r"steps\.jsonl: "):
        read_run(run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [lines[0], *("0," + line for line in lines[1:])], "damaged"),
        (lambda lines: [lines[0], "9" * 30 + lines[1][lines[1].index(",") :], *lines[2:]], "damaged or incomplete"),
        (lambda lines: lines[:1], "is not from the same run as metrics.json, or damaged"),
        (lambda lines: [*lines, lines[-1]], "is not from the same run as metrics.json, or damaged"),
    ],
)
def test_damaged_predictions_are_named(run, change, message):
    file = run / PREDICTIONS
    file.write_text("\n".join(change(file.read_text("utf-8").splitlines())) + "\n", "utf-8")
    with pytest.raises(UserError, match=message) as problem:
        read_run(run)
    assert "predictions.csv: " in str(problem.value)


def test_json_that_is_not_an_object_is_rejected(run):
    for content in ("[]", "null", "3", "NaN", "[" * 100_000, json.dumps("x")):
        (run / SPLIT.name).write_text(content)
        with pytest.raises(UserError, match=r"split\.json: (lacks|damaged)"):
            read_run(run)


@pytest.fixture
def formulas(tmp_path):
    """A CSV whose classes and reviews would run in a spreadsheet, or look as if they were escaped already."""
    classes = ["=a", "'=a", "x;=b"]
    reviews = [f"{begin}{i}" for i in range(20) for begin in ("=", "'=", "好;=", "a\n-", "很好", "-")]
    labels = [classes[i % 3] for i in range(len(reviews))]
    pd.DataFrame({"label": labels, "review": reviews}).to_csv(tmp_path / "formulas.csv", index=False)
    return tmp_path / "formulas.csv"


def test_the_original_texts_are_restored(formulas, tmp_path):
    run = read_run(write_run(tmp_path / "run", formulas))
    source = pd.read_csv(formulas, dtype=str).loc[run.predictions["row"]]
    assert run.predictions["review"].tolist() == source["review"].tolist()
    assert run.predictions["label"].tolist() == source["label"].tolist()
    assert set(run.predictions["predicted"]) == {"=a", "'=a", "x;=b"}
    assert [run.split["classes"][i] for i in run.class_ids("label")] == source["label"].tolist()
    assert list(run.probabilities) == [probability_column(name) for name in run.split["classes"]]


def test_a_run_of_the_first_version_can_still_be_read(review_csv, tmp_path):
    run = read_run(write_run(tmp_path / "run", review_csv(60, classes=("=a", "x;=b")), escaped=False))
    cells = pd.read_csv(tmp_path / "run" / PREDICTIONS)
    assert set(cells["label"]) == {"'=a", "x;=b"}
    assert set(run.predictions["label"]) == {"=a", "x;=b"}
    assert len(set(run.class_ids("label"))) == 2
