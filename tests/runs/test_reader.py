"""A run is read exactly as it was written; a missing or damaged file is one line that names it."""

from __future__ import annotations

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


@pytest.mark.parametrize("content", ["[1]", "null", "3", "NaN", '"x"'])
def test_json_that_is_not_an_object_is_rejected(run, content):
    (run / SPLIT.name).write_text(content)
    with pytest.raises(UserError, match=r"split\.json: damaged"):
        read_run(run)


def test_original_classes_and_exact_probabilities_are_restored_and_reviews_stay_escaped(tmp_path):
    # They would run in a spreadsheet, or look as if they were escaped already.
    classes = ["=a", "'=a", "x;=b"]
    reviews = [f"{begin}{i}" for i in range(20) for begin in ("=", "'=", "好;=", "a\n-", "很好", "-")]
    source = pd.DataFrame({"label": [classes[i % 3] for i in range(len(reviews))], "review": reviews})
    source.to_csv(tmp_path / "formulas.csv", index=False)
    folder = write_run(tmp_path / "run", tmp_path / "formulas.csv")
    run, cells = read_run(folder), pd.read_csv(folder / PREDICTIONS, dtype=str)
    rows = source.loc[run.predictions["row"]]
    assert run.predictions["review"].tolist() == rows["review"].map(escape).tolist()
    assert run.predictions["label"].tolist() == rows["label"].tolist()
    assert set(run.predictions["predicted"]) == set(classes)
    assert list(run.probabilities) == [probability_column(name) for name in run.split["classes"]]
    for name in classes:
        written = cells[escape(probability_column(name))]
        assert run.probabilities[probability_column(name)].tolist() == list(map(float, written))
