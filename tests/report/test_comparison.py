"""comparison.json: its documented keys, and each value against its definition."""

from __future__ import annotations

import dataclasses
import json

import pandas as pd
from sklearn.metrics import confusion_matrix

from app.report.baselines import measure_baselines
from app.report.comparison import compare_runs, compare_seeds
from app.report.explanation import conclude
from app.report.statistics import paired

DOCUMENTED_KEYS = {
    *("runs", "split_fingerprint", "first_differing_step", "max_loss_difference", "disagreements", "same_predictions"),
    *("misclassified_by_both", "n_misclassified_by_both", "statistics", "verdict", "floors", "confusion_matrices"),
}
PER_RUN = {"path", "folder", "accuracy", "f1", "loss", "train_seconds", "train_examples_per_second", "world_size"}


def conclusion_of(comparison: dict) -> str:
    return conclude(comparison["first_difference"], comparison["explanation"])


def test_identical_runs_have_no_difference(make_pair):
    comparison = compare_runs(*make_pair(same=True))
    assert comparison.keys() >= DOCUMENTED_KEYS
    assert all(run.keys() >= PER_RUN for run in comparison["runs"])
    assert comparison["verdict"] == "Bitwise identical training"
    assert comparison["max_loss_difference"] == 0
    assert comparison["same_predictions"]
    assert comparison["disagreements"] == []
    nothing = ("first_difference", "first_differing_step", "statistics", "explanation")
    assert [comparison[key] for key in nothing] == [None] * 4
    assert conclusion_of(comparison).startswith("bitwise identical")


def test_runs_with_identical_steps_but_other_results_are_not_identical(make_pair):
    a, b = make_pair(same=True)
    b.metrics["loss"] = 9.0
    comparison = compare_runs(a, b)
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
    for side, table in enumerate(tables):
        expected = confusion_matrix(table["label"], table["predicted"], labels=["0", "1"]).tolist()
        assert comparison["confusion_matrices"][side] == expected
    assert comparison["floors"] == measure_baselines(runs[0])
    assert conclusion_of(comparison).startswith("not equal: step 1: the loss is ")
    assert conclusion_of(comparison).endswith("threads 1 and 2; start both with --threads 1")


def test_the_20_most_confident_mistakes_of_both_runs_are_listed(make_pair, review_csv):
    runs = make_pair(reviews=review_csv(6_000))
    comparison = compare_runs(*runs, baselines=False)
    columns = ["row", "label", "review", "predicted", "probability_0", "probability_1"]
    both = pd.merge(*(run.predictions[columns] for run in runs), on=["row", "label", "review"])
    wrong = both[(both["label"] != both["predicted_x"]) & (both["label"] != both["predicted_y"])]
    confidence = sum(wrong[[f"probability_0_{run}", f"probability_1_{run}"]].max(axis=1) for run in "xy")
    listed = wrong.loc[confidence.sort_values(ascending=False).index[:20]]
    assert len(listed) == 20 < comparison["n_misclassified_by_both"] == len(wrong)
    found = comparison["misclassified_by_both"]
    for name in ("row", "label", "review"):
        assert [row[name] for row in found] == listed[name].to_list()
    assert [row["predicted"] for row in found] == listed[["predicted_x", "predicted_y"]].to_numpy().tolist()


def test_a_difference_in_loss_that_overflows_is_none(make_pair):
    a, b = make_pair(same=True)
    a.steps[5]["loss"], b.steps[5]["loss"] = 1e308, -1e308
    assert compare_runs(a, b, baselines=False)["max_loss_difference"] is None


def test_the_comparison_over_seeds_contains_every_pair(make_pair, review_csv):
    reviews = review_csv()
    pairs = [make_pair(same=seed == 2, reviews=reviews, seed=seed, world_size=1) for seed in (1, 2, 3)]
    comparison = compare_seeds(pairs)
    assert comparison.keys() >= DOCUMENTED_KEYS
    assert comparison["runs"][0]["folder"] == str(pairs[0][0].folder)
    entries, statistics = comparison["seeds"]["pairs"], comparison["seeds"]["paired_seeds"]
    assert [entry["seed"] for entry in entries] == [1, 2, 3]
    assert [entry["first_differing_step"] for entry in entries] == [1, None, 1]
    accuracies = [[run.metrics["accuracy"] for run in runs] for runs in zip(*pairs, strict=True)]
    for side in (0, 1):
        assert [entry["runs"][side]["accuracy"] for entry in entries] == accuracies[side]
    assert statistics == dataclasses.asdict(paired(*accuracies))
    assert comparison["verdict"] == comparison["seeds"]["verdict"] != entries[1]["verdict"]
    of_seeds = [measure_baselines(a) for a, _ in pairs]
    assert [entry["baselines"] for entry in entries] == of_seeds
    for number, baseline in enumerate(comparison["seeds"]["baselines"]):
        expected = paired(accuracies[0], [of_seed[number]["accuracy"] for of_seed in of_seeds])
        assert baseline["paired_seeds"] == dataclasses.asdict(expected)
    without = compare_seeds(pairs, baselines=False)["seeds"]
    assert without["baselines"] == []
    assert [entry["baselines"] for entry in without["pairs"]] == [None] * 3


def test_training_is_identical_only_if_it_is_for_every_seed(make_pair, review_csv):
    reviews = review_csv()
    pairs = [make_pair(same=True, reviews=reviews, seed=seed) for seed in (1, 2)]
    assert compare_seeds(pairs, baselines=False)["verdict"] == "Bitwise identical training"
    pairs[1][1].steps[11]["loss"] = 0.5
    comparison = compare_seeds(pairs, baselines=False)
    assert comparison["verdict"].startswith("Undecided over 2 seeds")
    assert comparison["settings"][0]["seed"] == 2, "the pair that differs is shown"
    assert comparison["first_difference"].startswith("step 12: the loss is ")
