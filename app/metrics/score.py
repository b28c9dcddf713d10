"""From logits to figures, through the `evaluate` modules of this folder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import confusion_matrix

from app.errors import RunError, UserError


@dataclass(frozen=True)
class Scores:
    """Figures of one evaluation over `n` rows.

    With two classes, f1, precision and recall are those of the second one (of label 1 where labels are 0 and 1); with
    more they are the unweighted mean over the classes. `loss` is the mean cross-entropy in nats.
    `confusion_matrix[i][j]` counts the rows of class i that were predicted as class j.
    """

    accuracy: float
    f1: float
    precision: float
    recall: float
    loss: float
    confusion_matrix: list[list[int]]
    n: int


NAMES = ("accuracy", "f1", "precision", "recall")


@cache
def _metric(name: str) -> Any:
    return evaluate.load(str(Path(__file__).with_name(f"{name}.py")), keep_in_memory=True)


def load_metrics() -> None:
    """Load the metric modules, so that a problem with them is found before the training.

    Raises:
        UserError: `evaluate` cannot write to its cache of modules.
    """
    try:
        for name in NAMES:
            _metric(name)
    except OSError as problem:
        raise UserError(
            f"{problem.filename or 'the cache of `evaluate`'}: cannot be written: {problem.strerror}: set HF_HOME to a "
            f"folder that can be written"
        ) from None


def score(logits: NDArray[np.floating[Any]], labels: NDArray[np.int64]) -> Scores:
    """Scores the rows' logits, float (n, classes), against their class ids, int64 (n,).

    Raises:
        RunError: the loss is not finite: the weights are beyond saving.
    """
    n, n_classes = logits.shape
    predicted = logits.argmax(axis=1)
    log_probabilities = torch.from_numpy(logits).double().log_softmax(dim=1).numpy()
    average = "binary" if n_classes == 2 else "macro"
    figures: dict[str, float] = _metric("accuracy").compute(predictions=predicted, references=labels)
    for name in ("f1", "precision", "recall"):
        figures |= _metric(name).compute(predictions=predicted, references=labels, average=average)
    loss = float(-log_probabilities[np.arange(n), labels].mean())
    if not math.isfinite(loss):
        raise RunError(f"the loss of the {n} rows that were evaluated is {loss}")
    return Scores(
        **figures,
        loss=loss,
        confusion_matrix=confusion_matrix(labels, predicted, labels=range(n_classes)).tolist(),
        n=n,
    )
