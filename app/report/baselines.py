"""Train and test two baselines, classifiers without a neural network, on the same rows as a run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.dummy import DummyClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.pipeline import make_pipeline

from ..common.errors import UserError
from ..common.files import write_json
from ..data.csv_table import ReviewTable, read_reviews, sample_rows
from ..data.sources import files_of
from ..data.split import Split, split_reviews
from ..runs.reader import Run
from .statistics import wilson_interval

RECIPE = "majority; tf-idf of characters 1-3, sublinear, min_df 2 from 1000 rows on; logistic regression, C 30"
MANY_ROWS = 1_000
CHUNK = 10_000  # test rows that are in memory at once


def measure_baselines(run: Run) -> list[dict[str, Any]]:
    """Train and test the baselines on the rows of a run.

    The results are cached in the run's `cache_dir`, if that still exists, under the split's fingerprint.

    Returns:
        For each baseline `name`, `accuracy`, `f1` and `interval` (Wilson's, of the accuracy).

    Raises:
        UserError: the run's CSV no longer exists, or its rows have changed.
    """
    cache = Path(run.settings.get("cache_dir") or "") / f"baselines-{run.split['fingerprint'][:32]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        cached = json.loads(cache.read_text("utf-8"))
        if cached["recipe"] == RECIPE and cached["fingerprint"] == run.split["fingerprint"]:
            return list(cached["baselines"])
    table, split = reread_rows(run)
    print(f"\nbaselines: training on {len(split.train):,} rows (skip with --no_baselines) …", flush=True)
    baselines = _measure(table, split)
    if cache.parent.is_dir():
        with contextlib.suppress(OSError):  # it is only a cache
            write_json(cache, {"recipe": RECIPE, "fingerprint": run.split["fingerprint"], "baselines": baselines})
    return baselines


def reread_rows(run: Run) -> tuple[ReviewTable, Split]:
    """Read the rows that a run was trained and tested on, from the CSV that its settings name.

    Raises:
        UserError: the file cannot be read, or its split has another fingerprint than the run's.
    """
    settings = run.settings
    columns = (settings.get("text_column") or "review", settings.get("label_column") or "label")
    table = read_reviews(files_of(settings), *columns)
    split = split_reviews(
        table,
        test_size=settings.get("test_size") or 0.1,
        validation_size=settings.get("validation_size") or 0.0,
        seed=settings["seed"],
        columns=columns,
    )
    if split.fingerprint != run.split["fingerprint"]:
        raise UserError(f"{settings['csv']}: has changed since the run: its split has another fingerprint now")
    return table, split


def _measure(table: ReviewTable, split: Split) -> list[dict[str, Any]]:
    train, labels = sample_rows(split.train), table.labels
    sampled = f", {len(train):,} of {len(split.train):,} rows" if len(train) < len(split.train) else ""
    n_grams = TfidfVectorizer(
        analyzer="char", ngram_range=(1, 3), sublinear_tf=True, min_df=2 if len(split.train) >= MANY_ROWS else 1
    )
    # newton-cg converges, whereas lbfgs stops early: the accuracy does not depend on how the machine rounds.
    # C and sublinear_tf are the best of a 3-fold cross-validation on the hotel reviews' training rows.
    classifiers = {
        "majority class": DummyClassifier(strategy="most_frequent"),
        f"TF-IDF + logistic regression{sampled}": make_pipeline(n_grams, LogisticRegression(C=30, solver="newton-cg")),
    }
    test = [split.test[start : start + CHUNK] for start in range(0, len(split.test), CHUNK)]
    # F1 as for the runs: of the second class if there are two, otherwise the unweighted mean.
    average = "binary" if len(table.class_names) == 2 else "macro"
    baselines = []
    for name, classifier in classifiers.items():
        classifier.fit(table.texts.iloc[train].to_numpy(object), labels[train])
        predicted = np.concatenate([classifier.predict(table.texts.iloc[rows].to_numpy(object)) for rows in test])
        interval = wilson_interval(int((labels[split.test] == predicted).sum()), len(predicted))
        f1 = float(f1_score(labels[split.test], predicted, average=average, zero_division=0))
        entry = {"name": name, "accuracy": interval.estimate, "f1": f1, "interval": dataclasses.asdict(interval)}
        baselines.append(entry)
    return baselines
