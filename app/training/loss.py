"""The training loss with `--class_weights` or `--label_smoothing_factor`: the same at any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils.class_weight import compute_class_weight
from torch.nn.functional import cross_entropy

from ..common.errors import UserError
from ..data.batches import BatchPlan, FullBatchSampler
from ..settings import Settings
from ..strategies.optimization import Loss, mean_loss
from .build import ReviewData


def build_loss(settings: Settings, data: ReviewData) -> Loss:
    """Return the training loss: the model's own unless the settings change it.

    Raises:
        UserError: as for `class_weights`.
    """
    if settings.class_weights is None and settings.label_smoothing_factor == 0:
        return mean_loss
    labels = data.table.labels[data.split.train]
    weights = class_weights(settings.class_weights, labels, data.table.class_names)
    return WeightedLoss(weights, labels, data.train_sampler([0], settings), smoothing=settings.label_smoothing_factor)


def class_weights(requested: str | None, labels: NDArray[np.int64], classes: Sequence[str]) -> NDArray[np.float64]:
    """Return the weight of each class, float64 (classes,).

    Args:
        requested: `balanced`, n / (classes * rows of the class), as in scikit-learn (King and Zeng 2001); or one number
            per class, separated by commas; or None: all classes have the same weight.
        labels: of the n training rows, numbers of classes.

    Raises:
        UserError: there are more or fewer weights than classes, or a class that is to be balanced has no rows.
    """
    if requested in (None, "balanced"):
        try:
            weights: NDArray[np.float64] = compute_class_weight(requested, classes=np.arange(len(classes)), y=labels)
        except ValueError:  # published parts may have different classes
            raise UserError(f"--class_weights {requested}: a class has no training rows: give the weights") from None
        return weights
    weights = np.array([float(weight) for weight in requested.split(",")])
    if len(weights) != len(classes):
        raise UserError(
            f"--class_weights {requested}: {len(weights)} given, for {len(classes)} classes: give one for each of "
            f"{', '.join(classes)}"
        )
    return weights


class WeightedLoss:
    """Cross-entropy with class weights and label smoothing over the global batch.

    The mean over a global batch is the sum of the rows' weighted losses, divided by the sum of the rows' weights, as
    `torch.nn.CrossEntropyLoss(weight, label_smoothing=...)` computes it for a single large batch. If each micro-batch
    were divided by the sum of its own weights, a row would count more or less depending on the rows beside it, and so
    on the number of ranks (huggingface/transformers#35061).

    The sum over all ranks needs no communication, because the sampler gives every rank the rows of the global batch.
    """

    def __init__(
        self,
        weights: NDArray[np.float64],
        labels: NDArray[np.int64],
        sampler: FullBatchSampler,
        *,
        smoothing: float,
    ) -> None:
        """
        Args:
            weights: (classes,).
            labels: (n_train,), numbers of classes.
            sampler: of the training rows. This object sets its epoch.
        """
        self.weights, self.sampler, self.smoothing = torch.from_numpy(weights), sampler, smoothing
        self.weight_of_rows = torch.from_numpy(weights[labels])
        self.epoch, self.sums = -1, torch.empty(0)

    def __call__(self, outputs: Any, labels: torch.Tensor, step: int) -> torch.Tensor:
        """Return the loss of a micro-batch, so that the mean over all micro-batches is the loss of the global batch."""
        logits = outputs.logits.to(torch.promote_types(outputs.logits.dtype, torch.float32))  # autocast returns 16 bits
        self.weights = self.weights.to(logits)  # once; later this does nothing
        total = cross_entropy(logits, labels, self.weights, label_smoothing=self.smoothing, reduction="sum")
        plan = self.sampler.plan
        return total * (plan.logical_ranks * plan.accumulation_steps / self.sum_of_weights(step, plan))

    def sum_of_weights(self, step: int, plan: BatchPlan) -> float:
        """Return the sum of the weights of the rows of a global batch; `step` counts the steps before it."""
        epoch, step_of_epoch = divmod(step, plan.steps_per_epoch)
        if epoch != self.epoch:
            self.sampler.set_epoch(epoch)
            self.epoch, self.sums = epoch, self.weight_of_rows[self.sampler.batches()].sum(dim=1)
        return float(self.sums[step_of_epoch])
