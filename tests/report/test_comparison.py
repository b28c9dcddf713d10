"""comparison.json: its documented keys, and each value against its definition."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest
from helpers.run_folders import edit_json, edit_step, write_run
from sklearn.metrics import confusion_matrix

from app.common.errors import UserError
from app.report.baselines import measure_baselines
from app.report.comparison import compare_runs, compare_seeds
from app.report.render import write_comparison
from app.report.statistics import paired
from app.runs.reader import read_run

DOCUMENTED_KEYS = {
    *("runs", "split_fingerprint", "first_differing_step", "max_loss_difference", "disagreements", "same_predictions"),
    *(
        "misclassified_by_both",
        "n_misclassified_by_both",
        "statistics",
        "verdict",
        "floors",
        "confusion_matrices",
    ),
}
PER_RUN = {"path", "folder", "accuracy", "f1", "loss", "train_seconds", "train_examples_per_second", "world_size"}


@pytest.fixture
def pair(review_csv, tmp_path):
    """A function that writes two runs, which are identical if their seeds are equal and differ otherwise."""

    def make(rng_seeds=(0, 1), reviews=None, names=("a", "b"), **settings):
        reviews = reviews or review_csv()
        path_names = ("ddp_loop", "trainer_run")
        return tuple(
            read_run(write_run(tmp_path / name, reviews, path=path_name, rng_seed=rng_seed, **settings))
            for name, path_name, rng_seed in zip(names, path_names, rng_seeds, strict=True)
        )

    return make


def test_identical_runs_have_no_difference(pair):
    comparison = compare_runs(*pair((0, 0)))
    assert comparison.keys() >= DOCUMENTED_KEYS
    assert all(run.keys() >= PER_RUN for run in comparison["runs"])
    assert comparison["verdict"] == "Bitwise identical training"
    assert comparison["first_difference"] is None
    assert comparison["first_differing_step"] is None
    assert comparison["max_loss_difference"] == 0
    assert comparison["same_predictions"]
    assert comparison["disagreements"] == []
    assert (comparison["statistics"], comparison["explanation"]) == (None, None)


def test_runs_with_identical_steps_but_different_weights_are_not_identical(pair):
    a, b = pair((0, 0))
    file = b.folder / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    comparison = compare_runs(a, b)
    assert comparison["first_differing_step"] is None
    assert comparison["first_difference"].startswith("weights: ")
    assert comparison["verdict"].startswith("Undecided over 15 test rows")


def test_every_value_of_different_runs_agrees_with_its_definition(pair):
    runs = pair()
    comparison = compare_runs(*runs)
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
    assert [baseline["name"] for baseline in comparison["floors"]] == ["majority class", "TF-IDF + logistic regression"]


def test_reviews_that_both_misclassify_are_sorted_by_confidence(pair, review_csv):
    runs = pair(reviews=review_csv(400))
    comparison = compare_runs(*runs)
    tables = [run.predictions for run in runs]
    wrong = (tables[0]["label"] != tables[0]["predicted"]) & (tables[1]["label"] != tables[1]["predicted"])
    rows = comparison["misclassified_by_both"]
    assert 0 < len(rows) == comparison["n_misclassified_by_both"] == wrong.sum() < 20
    assert {row["row"] for row in rows} == set(tables[0]["row"][wrong])
    confidences = [sum(max(of_run) for of_run in row["probabilities"]) for row in rows]
    assert confidences == sorted(confidences, reverse=True)
    for row in rows:
        for table, predicted in zip(tables, row["predicted"], strict=True):
            line = table[table["row"] == row["row"]].iloc[0]
            assert (line["label"], line["predicted"], line["review"]) == (row["label"], predicted, row["review"])
            assert predicted != row["label"]


def test_identical_runs_list_at_most_20_reviews_that_both_misclassify(pair, review_csv):
    runs = pair((0, 0), reviews=review_csv(2_000))
    comparison = compare_runs(*runs)
    wrong = runs[0].predictions["label"] != runs[0].predictions["predicted"]
    assert comparison["disagreements"] == []
    assert len(comparison["misclassified_by_both"]) == 20 < comparison["n_misclassified_by_both"] == wrong.sum()
    least_confident = max(comparison["misclassified_by_both"][-1]["probabilities"][0])
    assert (runs[0].probabilities[wrong].max(axis=1) >= least_confident).sum() == 20


def test_the_files_are_valid_and_the_same_twice(pair, tmp_path):
    runs = pair()
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_comparison(compare_runs(*runs), tmp_path / name)
    for file in ("comparison.json", "comparison.md", "comparison.html"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes(), file
    assert json.loads((tmp_path / "first" / "comparison.json").read_text("utf-8")) == compare_runs(*runs)


def test_a_gradient_norm_is_a_difference(pair):
    a, b = pair((0, 0))
    edit_step(b.folder, 6, grad_norm=9.0)
    comparison = compare_runs(a, read_run(b.folder))
    assert comparison["first_differing_step"] == 6
    assert comparison["max_loss_difference"] == 0


def test_a_difference_in_loss_that_overflows_is_none(pair):
    a, b = pair((0, 0))
    edit_step(a.folder, 6, loss=1e308)
    edit_step(b.folder, 6, loss=-1e308)
    comparison = compare_runs(read_run(a.folder), read_run(b.folder))
    assert comparison["first_differing_step"] == 6
    assert comparison["max_loss_difference"] is None


def test_runs_with_different_splits_are_an_error(pair, review_csv):
    a, b = pair()
    edit_json(b.folder / "split.json", fingerprint="0" * 64)
    with pytest.raises(UserError, match=r"different splits \(\w+ and 0+\): train both"):
        compare_runs(a, read_run(b.folder))


def test_without_the_csv_there_are_no_baselines_and_a_reason(pair):
    a, b = pair()
    (a.folder.parent / "reviews.csv").unlink()
    comparison = compare_runs(a, b)
    assert comparison["floors"] is None
    assert "reviews.csv: no such file" in comparison["why_no_floors"]


def test_the_comparison_over_seeds_contains_every_pair(pair, review_csv):
    reviews = review_csv()
    pairs = [
        pair((seed, seed + (seed != 2)), reviews, (f"a{seed}", f"b{seed}"), seed=seed, world_size=1)
        for seed in (1, 2, 3)
    ]
    comparison = compare_seeds(pairs)
    assert comparison.keys() >= DOCUMENTED_KEYS
    assert comparison["runs"][0]["folder"] == str(pairs[0][0].folder)
    entries, statistics = comparison["seeds"]["pairs"], comparison["seeds"]["paired_seeds"]
    assert [entry["seed"] for entry in entries] == [1, 2, 3]
    assert [entry["first_differing_step"] for entry in entries] == [1, None, 1]
    assert entries[1]["verdict"] == "Bitwise identical training"
    assert statistics["n"] == 3
    assert statistics["mean_a"] == pytest.approx(sum(a.metrics["accuracy"] for a, _ in pairs) / 3)
    assert comparison["verdict"] == comparison["seeds"]["verdict"] != entries[1]["verdict"]
    assert entries[2]["runs"][1] == {
        "accuracy": pairs[2][1].metrics["accuracy"],
        "loss": pairs[2][1].metrics["loss"],
        "folder": str(pairs[2][1].folder),
    }
    majority, tf_idf = comparison["seeds"]["baselines"]
    assert majority["name"] == "majority class"
    assert tf_idf["name"].startswith("TF-IDF")
    of_seeds = [measure_baselines(a) for a, _ in pairs]
    assert [entry["baselines"] for entry in entries] == of_seeds
    for baseline, number in ((majority, 0), (tf_idf, 1)):
        accuracies = [of_seed[number]["accuracy"] for of_seed in of_seeds]
        expected = paired([a.metrics["accuracy"] for a, _ in pairs], accuracies)
        assert baseline["paired_seeds"] == dataclasses.asdict(expected)
    without = compare_seeds(pairs, baselines=False)["seeds"]
    assert without["baselines"] == []
    assert [entry["baselines"] for entry in without["pairs"]] == [None] * 3


def test_training_is_identical_only_if_it_is_for_every_seed(pair, review_csv):
    reviews = review_csv()
    pairs = [pair((s, s), reviews, (f"a{s}", f"b{s}"), seed=s) for s in (1, 2)]
    assert compare_seeds(pairs)["verdict"] == "Bitwise identical training"
    edit_step(pairs[1][1].folder, 12, loss=0.5)
    comparison = compare_seeds([pairs[0], (pairs[1][0], read_run(pairs[1][1].folder))])
    assert comparison["verdict"].startswith("Undecided over 2 seeds")
    assert comparison["settings"][0]["seed"] == 2, "the pair that differs is shown"
    assert comparison["first_difference"].startswith("step 12: the loss is ")


@pytest.mark.slow
def test_real_reviews_are_compared_in_seconds(pair, real_csv, tmp_path):
    """CPU time without the imports, which take about as long."""
    runs = pair(reviews=real_csv, test_size=0.1)
    start = time.process_time()
    (tmp_path / "out").mkdir()
    write_comparison(compare_runs(*runs), tmp_path / "out")
    assert time.process_time() - start < 10
