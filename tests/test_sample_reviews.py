"""The bundled sample: reproducible byte for byte, formatted like the real file, learnable but not trivial."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

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
    command = [sys.executable, str(DATA / "make_sample_reviews.py"), "--output", str(tmp_path / "rebuilt.csv")]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PYTHONHASHSEED": hash_seed})
    assert (tmp_path / "rebuilt.csv").read_bytes() == SAMPLE.read_bytes()


def test_the_file_is_formatted_like_the_real_one(reviews: pd.DataFrame) -> None:
    content = SAMPLE.read_bytes()
    assert content.startswith(b"label,review\n1,")
    assert b"\r" not in content
    with SAMPLE.open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    assert rows == [[str(label), review] for label, review in reviews.itertuples(index=False)], "as pandas reads them"
    assert reviews["label"].is_monotonic_decreasing
    assert 0.66 <= reviews["label"].mean() <= 0.70


def test_reviews_are_distinct_and_have_what_real_ones_have(reviews: pd.DataFrame) -> None:
    assert len(reviews) >= 1200
    assert reviews["review"].str.replace(r"\s", "", regex=True).is_unique
    for _, of_class in reviews.groupby("label")["review"]:
        assert (of_class.str.len() <= 10).sum() >= 20
        assert (of_class.str.len() > 126).mean() >= 0.15  # truncated by a model that reads 128 tokens
        for mark in (",", '"', "\n", "“", "|"):
            assert of_class.str.contains(mark, regex=False).any(), mark


def test_a_linear_model_learns_much_but_not_everything(reviews: pd.DataFrame) -> None:
    train, test = train_test_split(reviews, test_size=0.2, stratify=reviews["label"], random_state=0)
    vectorizer = TfidfVectorizer(analyzer="char", ngram_range=(1, 3), min_df=2, sublinear_tf=True)
    model = make_pipeline(vectorizer, LogisticRegression(C=10, max_iter=1000)).fit(train["review"], train["label"])
    majority = reviews["label"].value_counts(normalize=True).max()
    assert majority + 0.10 < model.score(test["review"], test["label"]) < 0.99
