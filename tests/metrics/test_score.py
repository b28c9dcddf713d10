"""Scores of an evaluation, compared with scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics

from app.common.errors import RunError, UserError
from app.metrics.score import find_positive_class, score
from app.settings import Settings


@given(n=st.integers(1, 40), classes=st.integers(2, 4), positive=st.integers(0, 1), seed=st.integers(0, 999))
def test_scores_equal_those_of_scikit_learn(n, classes, positive, seed):
    random = np.random.default_rng(seed)
    logits, labels = random.normal(size=(n, classes)), random.integers(0, classes, size=n)
    predicted = logits.argmax(axis=1)
    of_class = {"average": "binary", "pos_label": positive} if classes == 2 else {"average": "macro"}
    scores = score(logits, labels, positive)
    assert scores.accuracy == metrics.accuracy_score(labels, predicted)
    for name in ("f1", "precision", "recall"):
        expected = getattr(metrics, f"{name}_score")(labels, predicted, **of_class, zero_division=0)
        assert getattr(scores, name) == expected
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert scores.loss == pytest.approx(metrics.log_loss(labels, probabilities, labels=range(classes)))
    assert scores.confusion_matrix == metrics.confusion_matrix(labels, predicted, labels=range(classes)).tolist()
    assert scores.n == n


def test_the_second_of_two_classes_is_the_positive_one_and_none_of_three():
    assert find_positive_class(Settings(), ["0", "1"]) == 1
    with pytest.raises(UserError, match="--positive_class 1: is not one of two classes: '0', '1', '2'"):
        find_positive_class(Settings(positive_class="1"), ["0", "1", "2"])


def test_huge_logits_have_a_finite_loss():
    assert score(np.array([[1e4, -1e4], [-1e4, 1e4]]), np.array([0, 0])).loss == 1e4


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_non_finite_loss_fails_the_run(value):
    with pytest.raises(RunError, match="the loss of the 2 rows"):
        score(np.array([[0.0, 1.0], [0.0, value]]), np.array([0, 1]))
