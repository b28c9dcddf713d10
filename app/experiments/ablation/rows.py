"""The rows of a variant: how they are split, on which of them each step trains, and which of them are counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler

from ...data.reviews import Indices, ReviewTable
from ...data.sampler import plan_batches
from ...data.split import Split, split_reviews
from ...distributed.world import World
from ...settings import Settings
from ...training.build import ReviewData, build_data
from .variants import BASELINE, Variant

SEED_DISTANCE = 1_000  # between the seeds of the ranks' splits: other trainings of the ablation use the seeds between


def build_variant_data(settings: Settings, variant: Variant, world: World) -> ReviewData:
    """Build the data as the training paths do, except for the variant's split function."""
    split_rows = split_reviews if variant.split == BASELINE.split else split_with_datasets
    return build_data(replace(settings, disable_tqdm=True), world, split_rows)


def split_with_datasets(table: ReviewTable, *, test_size: float, validation_size: float, **options: Any) -> Split:
    """Split like `split_reviews`, but select the rows with `datasets` and without stratifying."""
    split = split_reviews(table, test_size=test_size, validation_size=validation_size, **options)

    def divide(rows: Indices, size: float) -> tuple[Indices, Indices]:
        parts = datasets.Dataset.from_dict({"row": rows}).train_test_split(test_size=size, seed=options["seed"])
        rest, selected = (np.sort(np.asarray(parts[name]["row"], dtype=np.int64)) for name in ("train", "test"))
        return rest, selected

    train, test = divide(np.arange(len(table), dtype=np.int64), test_size)
    train, validation = divide(train, validation_size) if validation_size else (train, split.validation)
    return replace(split, train=train, validation=validation, test=test)


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
    steps = _order(settings, variant, data)
    if variant.rows == "own split of each rank":
        shares = np.split(steps, ranks, axis=1)
        return np.concatenate(
            [rows[share] for rows, share in zip(_own_train_rows(settings, data), shares, strict=True)], 1
        )
    return data.split.train[steps]


def _order(settings: Settings, variant: Variant, data: ReviewData) -> NDArray[np.int64]:
    """Return the rows of each step as positions among the training rows, in the order of the logical ranks."""
    sampler = data.train_sampler(range(data.plan.logical_ranks), settings)
    epochs = []
    for epoch in range(data.plan.epochs):
        sampler.set_epoch(0 if variant.rows == "same order in each epoch" else epoch)
        epochs.append(sampler.epoch_rows())
    order: NDArray[np.int64] = torch.cat(epochs)[: data.plan.total_steps].numpy()
    return order


def _own_train_rows(settings: Settings, data: ReviewData) -> list[Indices]:
    """Return the training rows of each rank's own split. Rank 0, which reports the accuracy, has the baseline's."""
    splits = [
        split_reviews(
            data.table,
            test_size=settings.test_size,
            validation_size=settings.validation_size,
            seed=settings.seed + rank * SEED_DISTANCE,
        )
        for rank in range(1, data.plan.logical_ranks)
    ]
    return [data.split.train, *(split.train for split in splits)]


def count_rows(correct: NDArray[np.bool_], variant: Variant, ranks: int) -> NDArray[np.bool_]:
    """Return the test rows that a variant counts, in some order and some of them perhaps twice."""
    return correct[::ranks] if variant.counts_rank_0_only else repeat_padded_rows(correct, variant.counted_ranks)


def repeat_padded_rows(correct: NDArray[np.bool_], ranks: int) -> NDArray[np.bool_]:
    """Return the rows as `DistributedSampler` distributes them: it repeats the first rows to make the shards equal."""
    if ranks == 1:
        return correct
    n = len(correct)
    shards = [DistributedSampler(range(n), ranks, rank, shuffle=False) for rank in range(ranks)]  # type: ignore[arg-type, var-annotated]
    return np.concatenate([correct[list(shard)] for shard in shards])
