"""A run is read exactly as it was written; a missing or damaged file is one line that names it."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from helpers.run_folders import write_run

from app.common.errors import UserError
from app.runs.csv_escape import escape
from app.runs.reader import read_run
from app.runs.schema import METRICS, PREDICTIONS, SETTINGS, SPLIT, STEPS, probability_column


@pytest.fixture
def run(review_csv, tmp_path):
    return write_run(tmp_path / "run", review_csv())


@pytest.mark.parametrize("file", [SETTINGS.name, SPLIT.name, METRICS.name, STEPS.name, PREDICTIONS])
def test_a_file_that_is_missing_or_cut_is_named(run, file):
    content = (run / file).read_bytes()
    (run / file).write_bytes(content[:20])
    with pytest.raises(UserError, match=rf"{file}: damaged or incomplete") as problem:
        read_run(run)
    assert "\n" not in str(problem.value)
    (run / file).unlink()
    with pytest.raises(UserError, match=rf"{file}: missing: the run has not finished"):
        read_run(run)


def test_json_that_is_not_an_object_is_rejected(run):
    for content in ("[1]", "null", "3", "NaN", json.dumps("x")):
        (run / SPLIT.name).write_text(content)
        with pytest.raises(UserError, match=r"split\.json: damaged"):
            read_run(run)


@pytest.fixture
def formulas(tmp_path):
    """A CSV whose classes and reviews would run in a spreadsheet, or look as if they were escaped already."""
    classes = ["=a", "'=a", "x;=b"]
    reviews = [f"{begin}{i}" for i in range(20) for begin in ("=", "'=", "好;=", "a\n-", "很好", "-")]
    labels = [classes[i % 3] for i in range(len(reviews))]
    pd.DataFrame({"label": labels, "review": reviews}).to_csv(tmp_path / "formulas.csv", index=False)
    return tmp_path / "formulas.csv"


def test_the_original_classes_are_restored_and_reviews_stay_escaped(formulas, tmp_path):
    run = read_run(write_run(tmp_path / "run", formulas))
    source = pd.read_csv(formulas, dtype=str).loc[run.predictions["row"]]
    assert run.predictions["review"].tolist() == source["review"].map(escape).tolist()
    assert run.predictions["label"].tolist() == source["label"].tolist()
    assert set(run.predictions["predicted"]) == {"=a", "'=a", "x;=b"}
    assert list(run.probabilities) == [probability_column(name) for name in run.split["classes"]]


def test_probabilities_are_read_exactly(run):
    cells = pd.read_csv(run / PREDICTIONS, dtype=str)
    read = read_run(run)
    for name in read.probabilities:
        assert read.predictions[name].tolist() == [float(cell) for cell in cells[name]]
