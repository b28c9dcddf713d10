"""The variants of the ablation: what typical scripts do differently, one thing at a time, and on which rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ..data.batches import plan_batches, resolve_train_batch_size
from ..data.split import split_reviews
from ..settings import Settings
from ..training.build import ReviewData

PADDED_RANKS = 8  # a node of GPUs; the share of repeated rows grows with the number of ranks
SEED_DISTANCE = 1_000  # between the seeds of the ranks' splits: other trainings of the ablation use the seeds between


@dataclass(frozen=True)
class Variant:
    """How a model is trained. The defaults are this project's, from which a variant differs in one field."""

    rows: Literal["divided", "same order in each epoch", "same on each rank", "own split of each rank"] = "divided"
    inflation: int = 1  # factor on loss and gradients
    optimizer: Literal["AdamW", "Adam"] = "AdamW"  # with decay and schedule; Adam with neither
    counted: Literal["once", "padded shards", "rank 0 only"] = "once"  # the correct test rows
    dropout_seed: int = 0  # added to the seed of the dropout masks


BASELINE = Variant()


def build_variants(ranks: int, accumulation_steps: int) -> dict[str, Variant]:
    """Return the variants by what they change. The first one is the control: it should have no systematic effect."""
    factor = max(2, ranks * accumulation_steps)
    return {
        "only another dropout seed (control)": Variant(dropout_seed=1_000),
        f"test rows padded to {PADDED_RANKS} equal shards by `DistributedSampler`, repeated rows counted": Variant(
            counted="padded shards"
        ),
        f"loss and gradients inflated by Trainer, x {factor}": Variant(inflation=factor),
        "Adam without decay or schedule instead of AdamW with both": Variant(optimizer="Adam"),
        "`set_epoch` forgotten: the same order in each epoch": Variant(rows="same order in each epoch"),
        f"no sampler: the same rows on each of {ranks} ranks": Variant(rows="same on each rank"),
        "an unseeded split: each rank has its own test rows": Variant(rows="own split of each rank"),
        f"correct rows of one of {ranks} ranks divided by all rows, no `all_reduce`": Variant(counted="rank 0 only"),
    }


def variant_settings(settings: Settings, variant: Variant, ranks: int) -> Settings:
    """Return the settings of a variant: one process works for all ranks."""
    if variant.optimizer == "Adam":  # AdamW without decay
        settings = replace(settings, weight_decay=0.0, lr_scheduler_type="constant")
    return replace(
        settings,
        logical_ranks=ranks,
        train_batch_size=resolve_train_batch_size(settings, ranks),
        per_device_train_batch_size=None,
    )


def rows_of_steps(settings: Settings, variant: Variant, data: ReviewData) -> NDArray[np.int64]:
    """Return the rows of each step as positions in the table, int64 (steps, rows), those of the first rank first.

    Args:
        settings: as returned by `variant_settings`.
        data: with the plan that belongs to these settings.
    """
    ranks = data.plan.logical_ranks
    if variant.rows == "same on each rank":
        # A rank without a sampler shuffles all rows, and forms batches of the size that its share would have: an epoch
        # has as many times the steps as there are ranks.
        alone = replace(settings, logical_ranks=1, train_batch_size=settings.train_batch_size // ranks)
        of_one_rank = replace(data, plan=plan_batches(alone, len(data.split.train), 1))
        return np.tile(data.split.train[_order(alone, variant, of_one_rank)], (1, ranks))
    shares = np.split(_order(settings, variant, data), ranks, axis=1)
    train_rows = [data.split.train] * ranks
    if variant.rows == "own split of each rank":  # rank 0, which reports the accuracy, has the baseline's
        split = partial(split_reviews, test_size=settings.test_size, validation_size=settings.validation_size)
        seeds = [settings.seed + rank * SEED_DISTANCE for rank in range(1, ranks)]
        train_rows[1:] = [split(data.table, seed=seed).train for seed in seeds]
    return np.concatenate([rows[share] for rows, share in zip(train_rows, shares, strict=True)], axis=1)


def _order(settings: Settings, variant: Variant, data: ReviewData) -> NDArray[np.int64]:
    """Return the rows of each step as positions among the training rows, in the order of the logical ranks."""
    sampler, epochs = data.train_sampler(range(data.plan.logical_ranks), settings), []
    for epoch in range(data.plan.epochs):
        sampler.set_epoch(0 if variant.rows == "same order in each epoch" else epoch)
        epochs.append(sampler.epoch_rows())
    order: NDArray[np.int64] = torch.cat(epochs)[: data.plan.total_steps].numpy()
    return order


def count_rows(correct: NDArray[np.bool_], variant: Variant, ranks: int) -> NDArray[np.bool_]:
    """Return the test rows that a variant counts, in some order and some of them perhaps twice."""
    if variant.counted == "rank 0 only":
        return correct[::ranks]
    # `DistributedSampler` repeats the first rows to make the shards equal.
    shards = PADDED_RANKS if variant.counted == "padded shards" else 1
    return np.resize(correct, math.ceil(len(correct) / shards) * shards)
