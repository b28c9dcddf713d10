"""Compute the scores of an evaluation from its logits."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..common.errors import RunError


@dataclass(frozen=True)
class Scores:
    """Scores of one evaluation.

    With two classes, F1, precision and recall refer to the second class (label 1 if the labels are 0 and 1); with more
    classes they are unweighted (macro) averages.
    """

    accuracy: float
    f1: float
    precision: float
    recall: float
    loss: float  # mean cross-entropy in nats
    confusion_matrix: list[list[int]]  # [i][j]: the number of rows of class i that were predicted as class j
    n: int  # number of rows


@cache
def load_metrics() -> Any:
    """Return the `evaluate` module. The first call imports `evaluate`, which takes seconds."""
    from .classification import Classification  # here, because `evaluate` imports transformers' pipelines

    # `evaluate.load` would copy the module into the user's cache, which may be shared and read-only.
    with tempfile.TemporaryDirectory() as folder:  # which `evaluate` creates and does not use
        return Classification(cache_dir=folder, keep_in_memory=True)


def score(logits: NDArray[np.floating[Any]], labels: NDArray[np.int64]) -> Scores:
    """Score predicted logits, float (n, classes), of rows with these class ids, int64 (n,).

    Raises:
        RunError: The loss is not finite, so the weights are unusable.
    """
    from sklearn.metrics import confusion_matrix

    n, n_classes = logits.shape
    predicted = logits.argmax(axis=1)
    log_probabilities = torch.from_numpy(logits).double().log_softmax(dim=1).numpy()
    average = "binary" if n_classes == 2 else "macro"
    metrics: dict[str, float] = load_metrics().compute(predictions=predicted, references=labels, average=average)
    loss = float(-log_probabilities[np.arange(n), labels].mean())
    if not math.isfinite(loss):
        raise RunError(f"the loss of the {n} rows that were evaluated is {loss}")
    return Scores(
        **metrics,
        loss=loss,
        confusion_matrix=confusion_matrix(labels, predicted, labels=range(n_classes)).tolist(),
        n=n,
    )
