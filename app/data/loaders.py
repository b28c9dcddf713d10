"""Batches of token ids: the collator, this rank's training micro-batches, and its share of an evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding

from app.data.sampler import BatchPlan, FullBatchSampler, LengthGroupedSampler
from app.distributed.world import World
from app.settings import Settings


class Collator(DataCollatorWithPadding):
    """Pad rows to the longest of a batch: the tokenizer's `model_input_names` and the labels, nothing else."""

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        names = {*self.tokenizer.model_input_names, "labels"}
        return super().__call__([{name: row[name] for name in row if name in names} for row in features])


def train_loader(
    rows: Dataset,
    lengths: NDArray[np.int64],
    collator: Collator,
    plan: BatchPlan,
    world: World,
    settings: Settings,
) -> DataLoader[Any]:
    """This rank's micro-batches, `plan.steps_per_epoch * plan.accumulation_steps` an epoch. Call `sampler.set_epoch`!

    Args:
        rows: the tokenised training rows.
        lengths: int64 (n_train,), tokens of each.
    """
    sampler: FullBatchSampler
    if settings.train_sampling_strategy == "group_by_length":
        sampler = LengthGroupedSampler(lengths, plan.global_size, world, settings.seed)
    else:
        sampler = FullBatchSampler(len(rows), plan.global_size, world, settings.seed)
    return _loader(rows, collator, plan.micro_size, sampler, world)


def shard_loader(
    rows: Dataset, lengths: NDArray[np.int64], collator: Collator, world: World, settings: Settings
) -> DataLoader[Any]:
    """This rank's share of rows to evaluate: each row on exactly one rank, none twice, none padded.

    Rows are dealt from short to long, so every rank has the same work; `loader.sampler` lists the positions, in order.
    `DistributedSampler` would repeat the first rows to make the shares equal (pytorch#25162): not for counting.
    """
    mine = np.argsort(lengths, kind="stable")[world.rank :: world.size]
    return _loader(rows, collator, settings.eval_batch_size, mine.tolist(), world)


def _loader(rows: Dataset, collator: Collator, batch_size: int, sampler: Any, world: World) -> DataLoader[Any]:
    # Without a generator of its own, each iter(loader) draws from the global stream, and so from the training's
    # dropout.
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        rows,
        batch_size,
        sampler=sampler,
        collate_fn=collator,
        generator=generator,
        pin_memory=world.device.type == "cuda",
    )
