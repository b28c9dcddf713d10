"""The baselines: trained and tested on exactly the rows of the run."""

from __future__ import annotations

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
from app.report.comparison import compare_seeds
from app.report.statistics import wilson_interval
from app.runs.reader import read_run


@pytest.fixture
def run(review_csv, tmp_path):
    return read_run(write_run(tmp_path / "run", review_csv()))


def test_the_majority_class_agrees_with_a_manual_calculation(run):
    by_name = {baseline["name"]: baseline for baseline in measure_baselines(run)}
    majority = by_name["majority class"]
    labels = run.predictions["label"]  # two thirds are class 1, in the training rows and in the test rows
    correct = int((labels == "1").sum())
    assert majority["accuracy"] == correct / len(labels)
    interval = wilson_interval(correct, len(labels))
    assert majority["interval"] == {
        "estimate": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "confidence": 0.95,
    }


def test_n_grams_separate_classes_that_use_different_words(run):
    by_name = {baseline["name"]: baseline for baseline in measure_baselines(run)}
    assert by_name["TF-IDF + logistic regression"]["accuracy"] == 1.0  # one class contains 差, the other one 好


def test_many_rows_are_sampled_and_the_name_says_so(run, monkeypatch):
    monkeypatch.setattr(reviews, "MAX_SAMPLE", 30)
    _, sampled = measure_baselines(run)
    assert sampled["name"] == "TF-IDF + logistic regression, 23 of 45 rows"
    assert sampled["accuracy"] == 1.0


def test_settings_that_are_null_are_the_defaults(run):
    edit_json(run.folder / "settings.json", text_column=None, label_column=None, validation_size=None)
    assert len(reread_rows(read_run(run.folder))[1].test) == run.split["n_test"]


def test_test_rows_are_not_used_for_training(run):
    table, split = reread_rows(run)
    assert sorted(table.rows[split.test]) == run.predictions["row"].to_list()
    assert not set(split.train) & set(split.test)


def test_a_missing_or_changed_csv_is_an_error(run, review_csv):
    path = review_csv()
    table = pd.read_csv(path)
    table.loc[0, "review"] += "！"
    table.to_csv(path, index=False)
    with pytest.raises(UserError, match="has changed since the run"):
        measure_baselines(run)
    path.unlink()
    with pytest.raises(UserError, match="no such file"):
        measure_baselines(run)


def test_settings_that_give_another_split_are_an_error(run, tmp_path):
    edit_json(run.folder / "settings.json", test_size=0.3)
    with pytest.raises(UserError, match="another fingerprint"):
        measure_baselines(read_run(run.folder))


@pytest.mark.slow
def test_the_baselines_of_the_real_reviews(real_csv, tmp_path):
    run = read_run(write_run(tmp_path / "run", real_csv, test_size=0.1))
    majority, n_grams = measure_baselines(run)
    assert majority["accuracy"] == np.mean(run.predictions["label"] == "1")
    rows = 2 / len(run.predictions)  # some lie so close to the boundary that a fit on another CPU decides otherwise
    assert n_grams["accuracy"] == pytest.approx(0.907, abs=rows)
    assert majority["interval"]["high"] < n_grams["interval"]["low"]


def test_a_line_announces_the_training_and_how_to_skip_it(run, capsys):
    measure_baselines(run)
    assert "baselines: training on 45 rows (skip with --no_baselines)" in capsys.readouterr().out


def test_no_baselines_trains_none_and_both_reports_say_so(review_csv, tmp_path, monkeypatch, capsys):
    folders = [
        str(write_run(tmp_path / name, review_csv(), rng_seed=rng_seed)) for name, rng_seed in (("a", 0), ("b", 1))
    ]
    monkeypatch.setattr(baselines, "reread_rows", lambda *_: pytest.fail("trained"))
    monkeypatch.setattr("sys.argv", ["compare", *folders, "--no_baselines", "--output_dir", str(tmp_path / "out")])
    assert run_program(compare.main) == 0
    assert "baselines: none (not computed because of --no_baselines)" in capsys.readouterr().out
    for name in ("comparison.md", "comparison.html"):
        assert "not computed because of --no_baselines" in (tmp_path / "out" / name).read_text("utf-8"), name
    assert json.loads((tmp_path / "out" / "comparison.json").read_text("utf-8"))["floors"] is None


def test_a_comparison_over_seeds_without_baselines_trains_none(review_csv, tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "reread_rows", lambda *_: pytest.fail("trained"))
    runs = [read_run(write_run(tmp_path / name, review_csv(), rng_seed=1)) for name in "ab"]
    assert compare_seeds([tuple(runs)], baselines=False)["floors"] is None
