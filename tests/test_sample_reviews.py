"""The bundled sample: reproducible byte for byte, formatted like the real file, learnable but not trivial."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline

DATA = Path(__file__).parents[1] / "data"
SAMPLE = DATA / "sample_reviews.csv"


@pytest.fixture(scope="module")
def reviews() -> pd.DataFrame:
    return pd.read_csv(SAMPLE)


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_the_script_reproduces_the_committed_file(tmp_path: Path, hash_seed: str) -> None:
    rebuilt = tmp_path / "rebuilt.csv"
    command = [sys.executable, str(DATA / "make_sample_reviews.py"), "--output", str(rebuilt)]
    printed = subprocess.run(
        command, check=True, capture_output=True, encoding="utf-8", env={**os.environ, "PYTHONHASHSEED": hash_seed}
    ).stdout
    assert rebuilt.read_bytes() == SAMPLE.read_bytes()
    statistics = printed.strip().split(": ", 1)[1]
    readme = " ".join((DATA / "README.md").read_text(encoding="utf-8").split())
    assert statistics in readme, f"data/README.md should quote: {statistics}"


def test_the_file_is_formatted_like_the_real_one() -> None:
    content = SAMPLE.read_bytes()
    assert content.startswith(b"label,review\n1,")
    assert content.endswith(b"\n")
    assert b"\r" not in content
    content.decode("utf-8")


def test_pandas_and_the_csv_module_read_the_same_rows(reviews: pd.DataFrame) -> None:
    with SAMPLE.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == list(reviews.columns) == ["label", "review"]
    assert rows == [[str(label), review] for label, review in reviews.itertuples(index=False)]


def test_there_are_many_distinct_and_trimmed_reviews(reviews: pd.DataFrame) -> None:
    bare = reviews["review"].str.replace(r"\s", "", regex=True)
    assert len(reviews) >= 1200
    assert bare.is_unique
    assert bare.str.len().min() >= 1
    assert (reviews["review"] == reviews["review"].str.strip()).all()


def test_labels_are_sorted_and_distributed_like_the_real_ones(reviews: pd.DataFrame) -> None:
    assert set(reviews["label"]) == {0, 1}
    assert reviews["label"].is_monotonic_decreasing
    assert 0.66 <= reviews["label"].mean() <= 0.70


@pytest.mark.parametrize("label", [0, 1])
def test_both_classes_have_short_and_long_reviews(reviews: pd.DataFrame, label: int) -> None:
    lengths = reviews.loc[reviews["label"] == label, "review"].str.len()
    assert 60 <= lengths.median() <= 110
    assert (lengths <= 10).sum() >= 20
    assert (lengths > 126).mean() >= 0.15  # truncated by a model that reads 128 tokens
    assert lengths.max() >= 800


@pytest.mark.parametrize("mark", [",", '"', "\n", "“", "|", "1", "check"])
def test_special_characters_occur_in_both_classes(reviews: pd.DataFrame, mark: str) -> None:
    assert set(reviews.loc[reviews["review"].str.contains(mark, regex=False), "label"]) == {0, 1}


def test_no_template_is_left_unexpanded(reviews: pd.DataFrame) -> None:
    text = reviews["review"].str.replace("-_-||", "", regex=False)
    assert not text.str.contains(r"[\[\]{}|]|None|praise|complaint").any()


def test_a_linear_model_learns_much_but_not_everything(reviews: pd.DataFrame) -> None:
    accuracies = []
    for seed in (0, 1):
        train, test = train_test_split(reviews, test_size=0.1, stratify=reviews["label"], random_state=seed)
        model = make_pipeline(
            TfidfVectorizer(analyzer="char", ngram_range=(1, 3), min_df=2, sublinear_tf=True),
            LogisticRegression(C=10, max_iter=1000),
        ).fit(train["review"], train["label"])
        accuracies.append(model.score(test["review"], test["label"]))
    majority = reviews["label"].value_counts(normalize=True).max()
    assert majority + 0.10 < np.mean(accuracies) < 0.99
