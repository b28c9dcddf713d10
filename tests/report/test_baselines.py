"""The baselines: trained and tested on exactly the rows of the run."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
from helpers.run_folders import edit_json, write_run

from app import compare
from app.common.errors import UserError
from app.data import reviews
from app.program import run_program
from app.report import baselines
from app.report.baselines import measure_baselines, reread_rows
from app.report.statistics import wilson_interval
from app.runs.reader import read_run


@pytest.fixture
def run(make_pair):
    return make_pair()[0]


def test_baselines_agree_with_a_manual_calculation(run):
    majority, n_grams = measure_baselines(run)
    correct = int((run.predictions["label"] == "1").sum())  # two thirds, in the training rows and in the test rows
    interval = wilson_interval(correct, len(run.predictions))
    assert majority == {
        "name": "majority class",
        "accuracy": correct / len(run.predictions),
        "interval": dataclasses.asdict(interval),
    }
    assert n_grams["name"] == "TF-IDF + logistic regression"
    assert n_grams["accuracy"] == 1.0, "one class contains 差, the other one 好"


def test_many_rows_are_sampled_and_the_name_says_so(run, monkeypatch):
    monkeypatch.setattr(reviews, "MAX_SAMPLE", 30)
    _, sampled = measure_baselines(run)
    assert sampled["name"] == "TF-IDF + logistic regression, 23 of 45 rows"
    assert sampled["accuracy"] == 1.0


def test_the_rows_are_those_of_the_run(run):
    """Settings that are null, such as in runs of earlier versions, are the defaults."""
    edit_json(run.folder / "settings.json", text_column=None, label_column=None, validation_size=None)
    table, split = reread_rows(read_run(run.folder))
    assert sorted(table.rows[split.test]) == run.predictions["row"].to_list()
    assert not set(split.train) & set(split.test)


def test_a_changed_csv_is_an_error(run):
    path = run.settings["csv"]
    table = pd.read_csv(path)
    table.loc[0, "review"] += "！"
    table.to_csv(path, index=False)
    with pytest.raises(UserError, match=r"reviews\.csv: has changed since the run"):
        measure_baselines(run)


@pytest.mark.slow
def test_the_baselines_of_the_real_reviews(real_csv, tmp_path):
    run = read_run(write_run(tmp_path / "run", real_csv, test_size=0.1))
    majority, n_grams = measure_baselines(run)
    assert majority["accuracy"] == np.mean(run.predictions["label"] == "1")
    rows = 2 / len(run.predictions)  # some lie so close to the boundary that a fit on another CPU decides otherwise
    assert n_grams["accuracy"] == pytest.approx(0.907, abs=rows)
    assert majority["interval"]["high"] < n_grams["interval"]["low"]


def test_no_baselines_trains_none_and_the_reports_say_so(make_pair, tmp_path, monkeypatch, capsys):
    folders = [str(run.folder) for run in make_pair()]
    monkeypatch.setattr(baselines, "reread_rows", lambda *_: pytest.fail("trained"))
    monkeypatch.setattr("sys.argv", ["compare", *folders, "--no_baselines", "--output_dir", str(tmp_path / "out")])
    assert run_program(compare.main) == 0
    pages = [(tmp_path / "out" / name).read_text("utf-8") for name in ("comparison.md", "comparison.html")]
    assert all("not computed because of --no_baselines" in page for page in [capsys.readouterr().out, *pages])
    assert json.loads((tmp_path / "out" / "comparison.json").read_text("utf-8"))["floors"] is None
