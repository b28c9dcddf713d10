"""The bundled sample: reproducible byte for byte, and learnable but not trivial."""

from __future__ import annotations

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


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_the_script_reproduces_the_committed_file(tmp_path, hash_seed):
    command = [sys.executable, str(DATA / "make_sample_reviews.py"), "--output", str(tmp_path / "rebuilt.csv")]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PYTHONHASHSEED": hash_seed})
    assert (tmp_path / "rebuilt.csv").read_bytes() == SAMPLE.read_bytes()


def test_a_linear_model_learns_much_but_not_everything():
    reviews = pd.read_csv(SAMPLE)
    assert reviews["review"].str.replace(r"\s", "", regex=True).is_unique, "no test row is a training row"
    train, test = train_test_split(reviews, test_size=0.2, stratify=reviews["label"], random_state=0)
    vectorizer = TfidfVectorizer(analyzer="char", ngram_range=(1, 3), min_df=2, sublinear_tf=True)
    model = make_pipeline(vectorizer, LogisticRegression(C=10, max_iter=1000)).fit(train["review"], train["label"])
    majority = reviews["label"].value_counts(normalize=True).max()
    assert majority + 0.10 < model.score(test["review"], test["label"]) < 0.99
