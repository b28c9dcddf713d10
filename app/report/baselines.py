"""Two floors under every accuracy: what needs no neural network at all reaches this much on the same rows."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.dummy import DummyClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.pipeline import make_pipeline

from app.data.csv_table import ReviewTable, read_reviews
from app.data.split import Split, split_reviews
from app.errors import UserError
from app.report.statistics import Interval, wilson_interval
from app.runs.reader import Run

RECIPE = "majority; tf-idf of characters 1-3, sublinear, min_df 2 from 1000 rows on; logistic regression, C 30"
MANY_ROWS = 1_000


def measure_baselines(run: Run) -> list[dict[str, Any]]:
    """Accuracy (with Wilson's interval) and F1 of each floor, trained and tested on the run's own rows.

    Kept in the run's `cache_dir`, where that still exists, under the split's fingerprint.

    Raises:
        UserError: the run's CSV is gone, or gives other rows now.
    """
    cache = Path(run.settings.get("cache_dir") or "") / f"floors-{run.split['fingerprint'][:32]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(cache.read_text("utf-8"))
        if kept["recipe"] == RECIPE and kept["fingerprint"] == run.split["fingerprint"]:
            return [
                {"name": str(floor["name"]), "accuracy": float(floor["accuracy"]), "f1": float(floor["f1"])}
                | {"interval": dataclasses.asdict(Interval(**{k: float(x) for k, x in floor["interval"].items()}))}
                for floor in kept["floors"]
            ]
    table, split = reread_rows(run)
    print(f"\nbaselines: training on {len(split.train):,} rows (skip with --no_baselines) …", flush=True)
    floors = _measure(table, split)
    if cache.parent.is_dir():
        from app.files import write_json

        with contextlib.suppress(OSError):  # only a cache
            write_json(cache, {"recipe": RECIPE, "fingerprint": run.split["fingerprint"], "floors": floors})
    return floors


def reread_rows(run: Run) -> tuple[ReviewTable, Split]:
    """The rows that the run was trained and tested on, from the CSV that its settings name.

    Raises:
        UserError: the file can't be read, or its split has another fingerprint than the run's.
    """
    settings = run.settings
    columns = (settings.get("text_column", "review"), settings.get("label_column", "label"))
    sizes = (settings.get("test_size", 0.1), settings.get("validation_size", 0.0))
    table = read_reviews(settings["csv"], *columns)
    split = split_reviews(table, *sizes, settings["seed"], columns)
    if split.fingerprint != run.split["fingerprint"]:
        raise UserError(f"{settings['csv']}: has changed since the run: its split has another fingerprint now")
    return table, split


def _measure(table: ReviewTable, split: Split) -> list[dict[str, Any]]:
    n_grams = TfidfVectorizer(
        analyzer="char", ngram_range=(1, 3), sublinear_tf=True, min_df=2 if len(split.train) >= MANY_ROWS else 1
    )
    # newton-cg converges where lbfgs stops early: the figure doesn't hang on the machine's rounding.
    # C, sublinear_tf: the best of 3-fold cross-validation on the hotel reviews' training rows.
    classifiers = {
        "majority class": DummyClassifier(strategy="most_frequent"),
        "TF-IDF + logistic regression": make_pipeline(n_grams, LogisticRegression(C=30, solver="newton-cg")),
    }
    texts, labels = table.texts.to_numpy(), table.labels
    floors = []
    for name, classifier in classifiers.items():
        predicted = classifier.fit(texts[split.train], labels[split.train]).predict(texts[split.test])
        floors.append({"name": name} | _figures(labels[split.test], predicted, len(table.class_names)))
    return floors


def _figures(labels: NDArray[np.int64], predicted: NDArray[np.int64], n_classes: int) -> dict[str, Any]:
    """F1 as everywhere here: of the second class where there are two, else the unweighted mean over all."""
    interval = wilson_interval(int((labels == predicted).sum()), len(labels))
    average = "binary" if n_classes == 2 else "macro"
    return {
        "accuracy": interval.estimate,
        "f1": float(f1_score(labels, predicted, average=average, zero_division=0)),
        "interval": dataclasses.asdict(interval),
    }
