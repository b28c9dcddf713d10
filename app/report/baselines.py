"""Train and test two baselines, classifiers without a neural network, on the same rows as a run."""

from __future__ import annotations

from typing import Any

from sklearn.dummy import DummyClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from ..common.errors import UserError
from ..data.reviews import ReviewTable, sample_rows
from ..data.split import Split
from ..runs.reader import Run
from ..settings import TYPES, Settings
from ..training.build import read_and_split
from .statistics import wilson_interval

MANY_ROWS = 1_000


def measure_baselines(run: Run) -> list[dict[str, Any]]:
    """Train and test the baselines on the rows of a run.

    Returns:
        For each baseline `name`, `accuracy` and `interval` (Wilson's, of the accuracy).

    Raises:
        UserError: the run's CSV no longer exists, or its rows have changed.
    """
    table, split = reread_rows(run)
    print(f"\nbaselines: training on {len(split.train):,} rows (skip with --no_baselines) …", flush=True)
    train, texts, labels = sample_rows(split.train), table.texts.to_numpy(object), table.labels
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
    baselines = []
    for name, classifier in classifiers.items():
        predicted = classifier.fit(texts[train], labels[train]).predict(texts[split.test])
        interval = wilson_interval(int((labels[split.test] == predicted).sum()), len(predicted))
        baselines.append({"name": name, "accuracy": interval["estimate"], "interval": interval})
    return baselines


def reread_rows(run: Run) -> tuple[ReviewTable, Split]:
    """Read the rows that a run was trained and tested on, from the CSV that its settings name.

    Raises:
        UserError: the file cannot be read, or its split has another fingerprint than the run's.
    """
    known = {name: value for name, value in run.settings.items() if name in TYPES and value is not None}
    table, split, _ = read_and_split(Settings(**known), run.settings["world_size"])
    if split.fingerprint != run.split["fingerprint"]:
        raise UserError(f"{run.settings['csv']}: has changed since the run: its split has another fingerprint now")
    return table, split
