"""comparison.json: its documented keys, each value against its definition, and the baselines of the same rows."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from helpers.run_folders import edit_json
from sklearn.metrics import confusion_matrix

from app import compare
from app.common.errors import UserError
from app.data import reviews
from app.program import run_program
from app.report.baselines import measure_baselines, reread_rows
from app.report.comparison import compare_runs, compare_seeds, run_names
from app.report.statistics import paired, verdict, wilson_interval
from app.runs.reader import read_run

DOCUMENTED_KEYS = {
    *("runs", "split_fingerprint", "first_differing_step", "max_loss_difference", "disagreements", "same_predictions"),
    *("misclassified_by_both", "n_misclassified_by_both", "statistics", "verdict", "floors", "confusion_matrices"),
}
NAMES = "ddp_loop", "trainer_run"
PER_RUN = {"path", "folder", "accuracy", "f1", "loss", "train_seconds", "train_examples_per_second", "world_size"}


def test_identical_runs_have_no_difference_until_one_of_their_results_differs(make_pair):
    a, b = make_pair(same=True)
    comparison = compare_runs(a, b)
    assert comparison.keys() >= DOCUMENTED_KEYS
    assert all(run.keys() >= PER_RUN for run in comparison["runs"])
    equal = dict.fromkeys(["first_difference", "first_differing_step", "explanation"])
    equal |= {"verdict": "Bitwise identical training", "same_predictions": True, "disagreements": []}
    assert comparison.items() >= equal.items()
    assert [comparison["statistics"][name] for name in ("difference", "p_value", "a_only")] == [None, None, 0]
    b.metrics["loss"] = 9.0
    comparison = compare_runs(a, b, baselines=False)
    assert (comparison["first_differing_step"], comparison["max_loss_difference"]) == (None, 0)
    assert comparison["verdict"].startswith("Undecided over 15 test rows")


def test_every_value_of_different_runs_agrees_with_its_definition(make_pair):
    runs = make_pair(a={"threads": 1}, b={"threads": 2})
    comparison = compare_runs(*runs)
    assert json.loads(json.dumps(comparison)) == comparison
    assert comparison["first_differing_step"] == 1
    gaps = [abs(x["loss"] - y["loss"]) for x, y in zip(runs[0].steps, runs[1].steps, strict=True)]
    assert comparison["max_loss_difference"] == max(gaps) > 0
    tables = [run.predictions for run in runs]
    other = tables[0]["predicted"] != tables[1]["predicted"]
    assert other.any()
    assert [item["row"] for item in comparison["disagreements"]] == tables[0]["row"][other].to_list()
    correct = [table["label"] == table["predicted"] for table in tables]
    statistics = comparison["statistics"]
    assert statistics["a_only"] == (correct[0] & ~correct[1]).sum()
    assert statistics["b_only"] == (correct[1] & ~correct[0]).sum()
    expected = [confusion_matrix(table["label"], table["predicted"], labels=["0", "1"]).tolist() for table in tables]
    assert comparison["confusion_matrices"] == expected
    assert comparison["floors"] == measure_baselines(runs[0])


def test_runs_of_the_same_path_are_named_by_what_differs_in_their_folders(make_pair):
    a, b = make_pair(b={"path": "ddp_loop"})
    assert run_names(a, b) == ["a", "b"]
    moved = [replace(run, folder=run.folder / f"{name}/ddp_loop") for run, name in ((a, "old"), (a, "new"))]
    assert run_names(*moved) == ["old/ddp_loop", "new/ddp_loop"]


def test_the_20_most_confident_mistakes_of_both_runs_are_listed(make_pair, review_csv):
    runs = make_pair(reviews=review_csv(6_000))
    comparison = compare_runs(*runs, baselines=False)
    a, b = (run.predictions for run in runs)
    wrong = (a["label"] != a["predicted"]) & (b["label"] != b["predicted"])
    confidence = sum(run.probabilities.max(axis=1) for run in runs)[wrong]
    listed = confidence.sort_values(ascending=False).index[:20]
    assert len(listed) == 20 < comparison["n_misclassified_by_both"] == wrong.sum()
    predicted = pd.concat([a["predicted"], b["predicted"]], axis=1).loc[listed].to_numpy().tolist()
    expected = a.loc[listed, ["row", "label", "review"]].assign(predicted=predicted)
    found = pd.DataFrame(comparison["misclassified_by_both"])[list(expected)]
    assert found.to_dict("records") == expected.to_dict("records")


def test_the_comparison_over_seeds_contains_every_pair_and_shows_the_first_one_that_differs(make_pair, review_csv):
    reviews = review_csv()
    pairs = [make_pair(same=seed == 1, reviews=reviews, seed=seed, world_size=1) for seed in (1, 2, 3)]
    assert compare_seeds(pairs[:1], baselines=False)["verdict"] == "Bitwise identical training"
    comparison = compare_seeds(pairs)
    assert comparison.keys() >= DOCUMENTED_KEYS
    assert comparison["runs"][0]["folder"] == str(pairs[1][0].folder)
    entries, accuracies = comparison["seeds"]["pairs"], [[run.metrics["accuracy"] for run in pair] for pair in pairs]
    assert [(entry["seed"], entry["first_differing_step"]) for entry in entries] == [(1, None), (2, 1), (3, 1)]
    assert [[run["accuracy"] for run in entry["runs"]] for entry in entries] == accuracies
    of_a, of_b = zip(*accuracies, strict=True)
    assert comparison["seeds"]["paired_seeds"] == dataclasses.asdict(paired(of_a, of_b))
    assert comparison["verdict"] == comparison["seeds"]["verdict"] == verdict(paired(of_a, of_b), *NAMES, unit="seed")
    assert [entry["baselines"] for entry in entries] == [measure_baselines(a) for a, _ in pairs]


# ---- the baselines ---------------------------------------------------------------------------------------------------


def test_baselines_agree_with_a_manual_calculation_and_may_be_trained_on_a_sample(make_pair, monkeypatch):
    run, _ = make_pair()
    majority, n_grams = measure_baselines(run)
    correct = int((run.predictions["label"] == "1").sum())  # two thirds, in the training rows and in the test rows
    interval = wilson_interval(correct, len(run.predictions))
    assert majority == {"name": "majority class", "accuracy": correct / len(run.predictions), "interval": interval}
    assert n_grams["name"] == "TF-IDF + logistic regression"
    assert n_grams["accuracy"] == 1.0, "one class contains 差, the other one 好"
    monkeypatch.setattr(reviews, "MAX_SAMPLE", 30)
    _, sampled = measure_baselines(run)
    assert (sampled["name"], sampled["accuracy"]) == ("TF-IDF + logistic regression, 23 of 45 rows", 1.0)


def test_the_rows_are_those_of_the_run_unless_the_csv_has_changed(make_pair):
    """Settings that are null, such as in runs of earlier versions, are the defaults."""
    run, _ = make_pair()
    edit_json(run.folder / "settings.json", text_column=None, label_column=None, validation_size=None)
    run = read_run(run.folder)
    table, split = reread_rows(run)
    assert sorted(table.rows[split.test]) == run.predictions["row"].to_list()
    assert not set(split.train) & set(split.test)
    csv = Path(run.settings["csv"])
    csv.write_text(csv.read_text("utf-8").replace("第0次", "第0次！"), "utf-8")
    with pytest.raises(UserError, match=r"reviews\.csv: has changed since the run"):
        measure_baselines(run)


def test_no_baselines_trains_none_and_the_report_says_so_but_the_terminal_has_only_the_main_results(
    make_pair, tmp_path, monkeypatch, capsys
):
    folders = [str(run.folder) for run in make_pair()]
    monkeypatch.setattr("sys.argv", ["compare", *folders, "--no_baselines", "--output_dir", str(tmp_path / "out")])
    assert run_program(compare.main) == 0
    report = (tmp_path / "out" / "comparison.json").read_text()
    assert "not computed because of --no_baselines" in report
    _, header, *table, _, of_test_rows, conclusion, page = capsys.readouterr().out.splitlines()
    assert (header.split(), len(table)) == (["ddp_loop", "trainer_run", "difference"], 6)
    assert f'"verdict": "{of_test_rows}"' in report
    assert conclusion.startswith("not equal: ")
    assert page == f"open {tmp_path / 'out' / 'comparison.html'}"
