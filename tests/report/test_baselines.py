"""The floors: figures of classifiers that anyone could train, on exactly the run's rows."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from run_folders import edit_json, write_run

from app import compare
from app.errors import UserError
from app.report import baselines
from app.report.baselines import measure_baselines, reread_rows
from app.report.comparison import compare_seeds
from app.report.statistics import wilson_interval
from app.runs.reader import read_run


@pytest.fixture
def run(review_csv, tmp_path):
    return read_run(write_run(tmp_path / "run", review_csv()))


def test_the_majority_class_by_hand(run):
    found = {floor["name"]: floor for floor in measure_baselines(run)}
    majority = found["majority class"]
    labels = run.predictions["label"]  # two thirds are of class 1, in training as in testing
    right = int((labels == "1").sum())
    assert majority["accuracy"] == right / len(labels)
    assert majority["f1"] == pytest.approx(2 * right / (2 * right + (len(labels) - right)))
    interval = wilson_interval(right, len(labels))
    assert majority["interval"] == {
        "estimate": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "confidence": 0.95,
    }


def test_n_grams_tell_words_apart_that_a_class_count_can_not(run):
    found = {floor["name"]: floor for floor in measure_baselines(run)}
    assert found["TF-IDF + logistic regression"]["accuracy"] == 1.0  # one class says 差, the other 好


def test_more_than_two_classes(review_csv, tmp_path):
    run = read_run(write_run(tmp_path / "run", review_csv(90, classes=("bad", "fine", "good"))))
    majority, _ = measure_baselines(run)
    shares = run.predictions["label"].value_counts(normalize=True)
    assert majority["accuracy"] in shares.to_list()
    assert majority["f1"] < majority["accuracy"]  # macro: the other classes count 0


def test_training_never_sees_a_test_row(run):
    table, split = reread_rows(run)
    assert sorted(table.rows[split.test]) == run.predictions["row"].to_list()
    assert not set(split.train) & set(split.test)


def test_the_figures_are_kept_by_fingerprint_and_used_again(run, tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    first = measure_baselines(run)
    (kept,) = (tmp_path / "cache").iterdir()
    monkeypatch.setattr(baselines, "_measure", lambda *_: pytest.fail("measured twice"))
    assert measure_baselines(run) == first
    monkeypatch.undo()
    for damage in ("", "[]", kept.read_text()[:-9], json.dumps({"recipe": "another", "floors": []})):
        kept.write_text(damage)
        assert measure_baselines(run) == first, damage


def test_no_cache_folder_is_made(run, tmp_path):
    measure_baselines(run)
    assert not (tmp_path / "cache").exists()


def test_a_csv_that_is_gone_or_changed(run, review_csv):
    path = review_csv()
    table = pd.read_csv(path)
    table.loc[0, "review"] += "！"
    table.to_csv(path, index=False)
    with pytest.raises(UserError, match="has changed since the run"):
        measure_baselines(run)
    path.unlink()
    with pytest.raises(UserError, match="no such file"):
        measure_baselines(run)


def test_settings_that_name_another_split(run, tmp_path):
    edit_json(run.folder / "settings.json", test_size=0.3)
    with pytest.raises(UserError, match="another fingerprint"):
        measure_baselines(read_run(run.folder))


def test_the_real_reviews(real_csv, tmp_path):
    run = read_run(write_run(tmp_path / "run", real_csv, test_size=0.1))
    majority, n_grams = measure_baselines(run)
    assert majority["accuracy"] == np.mean(run.predictions["label"] == "1")
    assert round(n_grams["accuracy"], 3) == 0.907
    assert majority["interval"]["high"] < n_grams["interval"]["low"]


def test_a_line_says_that_the_baselines_are_being_trained_and_how_to_skip_them(run, tmp_path, capsys):
    (tmp_path / "cache").mkdir()
    measure_baselines(run)
    assert "baselines: training on 45 rows (skip with --no_baselines)" in capsys.readouterr().out
    measure_baselines(run)
    assert capsys.readouterr().out == "", "read from the cache"


def test_compare_without_baselines_trains_none_and_both_reports_say_so(review_csv, tmp_path, monkeypatch, capsys):
    folders = [str(write_run(tmp_path / name, review_csv(), chance=chance)) for name, chance in (("a", 0), ("b", 1))]
    monkeypatch.setattr(baselines, "_measure", lambda *_: pytest.fail("trained"))
    monkeypatch.setattr("sys.argv", ["compare", *folders, "--no_baselines", "--output_dir", str(tmp_path / "out")])
    assert compare.main() == 0
    assert "baselines: none (not computed, as --no_baselines asked)" in capsys.readouterr().out
    for name in ("comparison.md", "comparison.html"):
        assert "not computed, as --no_baselines asked" in (tmp_path / "out" / name).read_text("utf-8"), name
    assert json.loads((tmp_path / "out" / "comparison.json").read_text("utf-8"))["floors"] is None


def test_without_baselines_a_comparison_over_seeds_trains_none(review_csv, tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "_measure", lambda *_: pytest.fail("trained"))
    runs = [read_run(write_run(tmp_path / name, review_csv(), chance=1)) for name in "ab"]
    assert compare_seeds([tuple(runs)], baselines=False)["floors"] is None
