"""Decide which rows are in which batch: the same global batches with any number of ranks, in both training paths.

The permutation of an epoch depends only on the seed and the epoch. `DistributedSampler` assigns its rows to the ranks
in turn (`permutation[rank::world_size]`). For every world size that divides the global batch size B, the rows of all
ranks together at step k are therefore `permutation[k * B : (k + 1) * B]`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data.distributed import DistributedSampler

from app.distributed.world import World
from app.errors import UserError
from app.settings import Settings, resolve_train_batch_size


@dataclass(frozen=True)
class BatchPlan:
    """How the rows of an optimizer step are divided: `global_size = ranks * micro_size * accumulation_steps`."""

    global_size: int
    ranks: int
    micro_size: int
    accumulation_steps: int
    steps_per_epoch: int
    total_steps: int
    epochs: int

    def due(self, strategy: str, every: int, step: int) -> bool:
        """Tell whether an evaluation or a checkpoint follows a step.

        Args:
            strategy: `epoch` (at the end of each epoch), `steps` or `no`. Except for `no`, the last step is always due.
            every: the interval in steps for `steps`.
            step: the optimizer step, counted from 1.
        """
        if strategy == "no":
            return False
        return step == self.total_steps or step % (every if strategy == "steps" else self.steps_per_epoch) == 0

    def __str__(self) -> str:
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        micro = "1 micro-batch" if self.accumulation_steps == 1 else f"{self.accumulation_steps} micro-batches"
        return f"{self.global_size} rows per step = {ranks} x {self.micro_size} rows x {micro}"


def plan_batches(settings: Settings, n_train: int, world_size: int) -> BatchPlan:
    """Divide the global batch among ranks and accumulation steps.

    Raises:
        UserError: the batch can't be divided, and the message names the nearest sizes that can; or there are fewer
            training rows than one batch needs.
    """
    size, accumulation = resolve_train_batch_size(settings, world_size), settings.gradient_accumulation_steps
    shares = world_size * accumulation
    if size % shares:
        below, above = size // shares * shares, math.ceil(size / shares) * shares
        valid = " or ".join(str(near) for near in (below, above) if near)
        raise UserError(
            f"--train_batch_size {size} can't be divided among {world_size} rank(s) x --gradient_accumulation_steps "
            f"{accumulation}: use {valid}"
        )
    steps_per_epoch = n_train // size
    if steps_per_epoch == 0:
        per_device = settings.per_device_train_batch_size
        flag = f"--train_batch_size {size}"
        if per_device is not None:
            flag = f"--per_device_train_batch_size {per_device} x {shares} micro-batches = {size}"
        raise UserError(f"{n_train} training rows don't fill one batch: {flag} must be {n_train} or less")
    total = settings.max_steps if settings.max_steps > 0 else math.ceil(settings.num_train_epochs * steps_per_epoch)
    return BatchPlan(
        size, world_size, size // shares, accumulation, steps_per_epoch, total, math.ceil(total / steps_per_epoch)
    )


class FullBatchSampler(DistributedSampler[Any]):
    """A `DistributedSampler` whose epoch ends with the last complete global batch.

    The remaining rows are left out of the epoch. They are different rows in each epoch, because the permutation is.
    """

    def __init__(self, n_rows: int, batch_size: int, world: World, seed: int) -> None:
        super().__init__(range(n_rows), world.size, world.rank, shuffle=True, seed=seed, drop_last=True)  # type: ignore[arg-type]
        self.batch_size = batch_size
        self.total_size = n_rows // batch_size * batch_size
        self.num_samples = self.total_size // world.size
        self.steps_done = 0

    def set_epoch(self, epoch: int, steps_done: int = 0) -> None:
        """Choose the epoch's permutation, and how many of its optimizer steps a resumed run skips."""
        super().set_epoch(epoch)
        self.steps_done = steps_done

    def __iter__(self) -> Iterator[Any]:
        return iter(self.epoch_rows()[self.steps_done * self.rows_per_step :])

    @property
    def rows_per_step(self) -> int:
        """This rank's share of a global batch."""
        return self.batch_size // self.num_replicas

    def epoch_rows(self) -> list[int]:
        """Return this rank's rows of the complete epoch, in order."""
        return list(super().__iter__())

    def rows_of_step(self, step: int) -> list[int]:
        """Return this rank's rows of a step of the epoch, counted from 0."""
        return self.epoch_rows()[step * self.rows_per_step : (step + 1) * self.rows_per_step]


class LengthGroupedSampler(FullBatchSampler):
    """Global batches of reviews of similar length, which need little padding.

    A shuffled epoch is cut into pools of `POOL` batches; each pool is sorted by length and cut into batches; the
    batches of the epoch are shuffled. This is the recipe of `transformers`' `LengthGroupedSampler`, applied to the
    global batch rather than to a rank's. The rows of a batch stay sorted and are assigned to the ranks in turn, so
    every rank has the same range of lengths and waits as little as possible.
    """

    POOL = 50

    def __init__(self, lengths: NDArray[np.int64], batch_size: int, world: World, seed: int) -> None:
        super().__init__(len(lengths), batch_size, world, seed)
        self.lengths = torch.from_numpy(np.ascontiguousarray(lengths))

    def epoch_rows(self) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        shuffled = torch.randperm(len(self.lengths), generator=generator)[: self.total_size]
        pools = shuffled.split(self.POOL * self.batch_size)
        by_length = torch.cat([pool[self.lengths[pool].argsort(stable=True)] for pool in pools])
        batches = by_length.view(-1, self.batch_size)
        order = torch.randperm(len(batches), generator=generator)
        rows: list[int] = batches[order].flatten()[self.rank :: self.num_replicas].tolist()
        return rows
