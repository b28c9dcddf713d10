"""Compute the scores of an evaluation from its logits."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..common.errors import RunError, UserError, list_names, shorten
from ..setting_groups import split_label_names
from ..settings import Settings


@dataclass(frozen=True)
class Scores:
    """Scores of one evaluation. F1, precision and recall of more than two classes are unweighted (macro) averages."""

    accuracy: float
    f1: float
    precision: float
    recall: float
    loss: float  # mean cross-entropy in nats
    confusion_matrix: list[list[int]]  # [i][j]: the number of rows of class i that were predicted as class j
    n: int  # number of rows
    positive_class: int | None  # of two classes, the id of the one whose F1, precision and recall these are

    def describe(self, class_names: Sequence[str]) -> str:
        f1 = f"{name_f1(self.positive_class, class_names)} {self.f1:.4f}"
        return f"{self.accuracy:.4f} ({round(self.accuracy * self.n)} of {self.n} rows), {f1}"


def name_f1(positive_class: int | None, class_names: Sequence[str]) -> str:
    return "F1 (macro)" if positive_class is None else f"F1 (class {shorten(class_names[positive_class], 40)})"


def find_positive_class(settings: Settings, class_names: Sequence[str]) -> int:
    """Return the id of the class that `--positive_class` names, which is invalid unless it is one of two classes."""
    if (label := settings.positive_class) is None:
        return 1
    name = label if label in class_names else split_label_names(settings.label_names or "").get(label)
    if name not in class_names or len(class_names) > 2:
        raise UserError(f"--positive_class {shorten(label)}: is not one of two classes: {list_names(class_names)}")
    return class_names.index(name)


@cache
def load_metrics() -> Any:
    """Return the `evaluate` module. The first call imports `evaluate`, which takes seconds."""
    from .classification import Classification  # here, because `evaluate` imports transformers' pipelines

    # `evaluate.load` would copy the module into the user's cache, which may be shared and read-only.
    with tempfile.TemporaryDirectory() as folder:  # which `evaluate` creates and does not use
        return Classification(cache_dir=folder, keep_in_memory=True)


def score(logits: NDArray[np.floating[Any]], labels: NDArray[np.int64], positive_class: int = 1) -> Scores:
    """Score predicted logits, float (n, classes), of rows with these class ids, int64 (n,).

    Raises:
        RunError: The loss is not finite, so the weights are unusable.
    """
    from sklearn.metrics import confusion_matrix

    n, n_classes = logits.shape
    predicted = logits.argmax(axis=1)
    log_probabilities = torch.from_numpy(logits).double().log_softmax(dim=1).numpy()
    options = {"average": "binary", "pos_label": positive_class} if n_classes == 2 else {"average": "macro"}
    metrics: dict[str, float] = load_metrics().compute(predictions=predicted, references=labels, **options)
    loss = float(-log_probabilities[np.arange(n), labels].mean())
    if not math.isfinite(loss):
        raise RunError(f"the loss of the {n} rows that were evaluated is {loss}")
    return Scores(
        **metrics,
        loss=loss,
        confusion_matrix=confusion_matrix(labels, predicted, labels=range(n_classes)).tolist(),
        n=n,
        positive_class=positive_class if n_classes == 2 else None,
    )
