"""Decide which rows are in which batch: the same with any number of ranks, in both training paths.

The permutation of an epoch depends only on the seed and the epoch. Step k trains on
`permutation[k * B : (k + 1) * B]`, where B is the global batch size. These rows are divided among V *logical ranks* as
`DistributedSampler` would divide them among V processes: logical rank l gets every V-th row, starting at l. A process
works for one or more logical ranks, so the micro-batches depend on V but not on the number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ..common.errors import UserError
from ..distributed.world import World
from ..settings import Settings


@dataclass(frozen=True)
class BatchPlan:
    """How the rows of an optimizer step are divided."""

    global_size: int  # rows per optimizer step: logical_ranks * accumulation_steps * micro_size
    ranks: int  # the number of processes
    logical_ranks: int  # the number of equal shares of the global batch, a multiple of `ranks`
    micro_size: int  # rows of a micro-batch
    accumulation_steps: int  # micro-batches of each logical rank
    steps_per_epoch: int
    total_steps: int
    epochs: int

    @property
    def logical_ranks_per_rank(self) -> int:
        return self.logical_ranks // self.ranks

    @property
    def micro_batches_per_step(self) -> int:
        """The number of micro-batches of each process per optimizer step."""
        return self.logical_ranks_per_rank * self.accumulation_steps

    def logical_ranks_of(self, rank: int, interleaved: bool = False) -> list[int]:
        """Return the logical ranks that a process works for, in the order in which it trains on their micro-batches.

        Both orders make each process's logical ranks, and each position among them over all processes, a subtree of
        the same binary tree, so gradients add up to the same bits (see app.strategies.reduction).

        Args:
            interleaved: whether the n-th logical ranks of all processes are neighbors. A sharded strategy adds their
                gradients first. Otherwise a process's own logical ranks are neighbors, whose gradients it adds first.
        """
        per_rank = self.logical_ranks_per_rank
        return [n * self.ranks + rank if interleaved else rank * per_rank + n for n in range(per_rank)]

    def rows_of(self, logical_rank: int, micro_batch: int) -> range:
        """Return the positions in the global batch of the rows of a logical rank's micro-batch, counted from 0."""
        distance = self.logical_ranks * self.micro_size
        first = logical_rank + distance * micro_batch
        return range(first, first + distance, self.logical_ranks)

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
        shares = f"{self.ranks} rank(s)"
        if self.logical_ranks != self.ranks:
            shares = f"{self.logical_ranks} logical ranks (on {shares})"
        batches = f"{self.micro_size} rows x {self.accumulation_steps} micro-batch(es)"
        return f"{self.global_size} rows per step = {shares} x {batches}"


def resolve_train_batch_size(settings: Settings, world_size: int) -> int:
    """Return the global batch size: `train_batch_size`, unless `per_device_train_batch_size` is set."""
    size = (settings.per_device_train_batch_size or 0) * world_size * settings.gradient_accumulation_steps
    return size or settings.train_batch_size


def plan_batches(settings: Settings, n_train: int, world_size: int) -> BatchPlan:
    """Divide the global batch among logical ranks and accumulation steps.

    Raises:
        UserError: the logical ranks cannot be divided among the ranks, or the batch among the logical ranks, or there
            are fewer training rows than one batch needs.
    """
    logical_ranks, accumulation = settings.logical_ranks or world_size, settings.gradient_accumulation_steps
    # Fewer ranks add the gradients of the logical ranks up along the subtrees of one binary tree. PowerSGD keeps the
    # compression errors of each rank.
    may_share = logical_ranks & (logical_ranks - 1) == 0 and settings.ddp_comm_hook != "power_sgd"
    possible = [1 << i for i in range(logical_ranks.bit_length())] if may_share else [logical_ranks]
    if world_size not in possible:
        hook = "" if settings.ddp_comm_hook == "no" else f" with --ddp_comm_hook {settings.ddp_comm_hook}"
        raise UserError(
            f"--logical_ranks {logical_ranks}{hook} cannot be divided among {world_size} rank(s): start "
            f"{' or '.join(map(str, possible))} rank(s)"
        )
    size, n_micro_batches = resolve_train_batch_size(settings, world_size), logical_ranks * accumulation
    flag = f"--train_batch_size {size}"
    if settings.per_device_train_batch_size is not None:
        flag = f"--per_device_train_batch_size {settings.per_device_train_batch_size} ({size} rows per step)"
    if size % n_micro_batches:
        kind = f"{world_size} rank(s)" if logical_ranks == world_size else f"--logical_ranks {logical_ranks}"
        raise UserError(
            f"{flag} cannot be divided among {kind} x --gradient_accumulation_steps {accumulation}: must be a multiple "
            f"of {n_micro_batches}"
        )
    steps_per_epoch = n_train // size
    if steps_per_epoch == 0:
        raise UserError(f"{n_train} training rows do not fill one batch: {flag} must be {n_train} or less")
    total = settings.max_steps if settings.max_steps > 0 else math.ceil(settings.epochs(n_train) * steps_per_epoch)
    return BatchPlan(
        global_size=size,
        ranks=world_size,
        logical_ranks=logical_ranks,
        micro_size=size // n_micro_batches,
        accumulation_steps=accumulation,
        steps_per_epoch=steps_per_epoch,
        total_steps=total,
        epochs=math.ceil(total / steps_per_epoch),
    )


class FullBatchSampler(DistributedSampler[Any]):
    """A `DistributedSampler` for a process's logical ranks, whose epoch ends with the last complete global batch.

    The remaining rows are left out of the epoch. They are different rows in each epoch, because the permutation is.

    With `group_by_length`, global batches have reviews of similar length, which need little padding. A shuffled epoch
    is cut into pools of `POOL` batches; each pool is sorted by length and cut into batches; the batches of the epoch
    are shuffled. This is the recipe of `transformers`' `LengthGroupedSampler`, applied to the global batch rather than
    to a rank's. The rows of a batch stay sorted and are assigned to the logical ranks in turn, so every rank has the
    same range of lengths and waits as little as possible.
    """

    POOL = 50

    def __init__(
        self,
        lengths: NDArray[np.int64],  # (n_train,): the number of tokens of each row
        plan: BatchPlan,
        *,
        logical_ranks: Sequence[int],  # of the process, in the order of `Strategy.logical_ranks`
        seed: int,
        group_by_length: bool = False,
    ) -> None:
        rows = range(len(lengths))  # DistributedSampler only needs its length
        super().__init__(rows, plan.logical_ranks, logical_ranks[0], seed=seed, drop_last=True)  # type: ignore[arg-type]
        self.lengths = torch.from_numpy(np.ascontiguousarray(lengths))
        self.plan, self.logical_ranks, self.group_by_length = plan, logical_ranks, group_by_length
        self.steps_done = 0

    def set_epoch(self, epoch: int, steps_done: int = 0) -> None:
        """Choose the epoch's permutation, and how many of its optimizer steps a resumed run skips."""
        super().set_epoch(epoch)
        self.steps_done = steps_done

    def __len__(self) -> int:
        return self.plan.steps_per_epoch * self.plan.global_size // self.plan.ranks

    def __iter__(self) -> Iterator[Any]:
        # A list of all rows would take five times the memory of the tensor.
        return (row for step in self.epoch_rows()[self.steps_done :] for row in step.tolist())

    def epoch_rows(self) -> torch.Tensor:
        """Return this process's rows of the complete epoch, int64 (steps, rows), in the order of its logical ranks."""
        batches = self.batches()
        return torch.cat([batches[:, logical_rank :: self.num_replicas] for logical_rank in self.logical_ranks], dim=1)

    def batches(self) -> torch.Tensor:
        """Return the rows of every global batch of the epoch, int64 (steps, rows)."""
        size = self.plan.global_size
        generator = torch.Generator().manual_seed(self.seed + self.epoch)  # the permutation of DistributedSampler
        rows = torch.randperm(len(self.lengths), generator=generator)[: self.plan.steps_per_epoch * size]
        if not self.group_by_length:
            return rows.view(-1, size)
        pools = rows.split(self.POOL * size)
        by_length = torch.cat([pool[self.lengths[pool].argsort(stable=True)] for pool in pools]).view(-1, size)
        return by_length[torch.randperm(len(by_length), generator=generator)]


# --- evaluation -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvalSet:
    """Rows to evaluate, and this rank's share of them.

    Every rank has the same number of batches, because the forward pass of a sharded model is a collective.
    """

    name: str  # `validation` or `test`
    labels: NDArray[np.int64]  # class ids of all n rows, in file order
    loader: DataLoader[Any]  # this rank's batches
    is_filler: Sequence[bool]  # for each batch, whether it only makes the numbers equal: its logits must not be used
    positions: Sequence[int]  # of this rank's rows among the n rows, in the order of the batches, without filler
    positive_class: int = 1  # of two classes, the id of the one whose F1 is computed


def form_eval_batches(lengths: NDArray[np.int64], batch_size: int) -> list[list[int]]:
    """Sort rows by length and divide them into batches, whose size affects padding, and thereby rounding.

    The longest come first: while batches become longer, the free memory of the shorter ones is too small for them.
    """
    by_length = np.argsort(lengths, kind="stable").tolist()
    return [by_length[start : start + batch_size] for start in range(0, len(by_length), batch_size)][::-1]


def build_eval_set(
    name: str,
    rows: Dataset[Any],
    labels: NDArray[np.int64],
    *,
    batches: list[list[int]],
    collator: Callable[[list[Any]], Any],
    world: World,
) -> EvalSet:
    """Assign the batches of all rows to the ranks in turn: each row is on exactly one rank.

    The batches, and with them padding and logits, are the same at any number of ranks. `DistributedSampler` would
    assign single rows, and repeat the first ones to make the shares equal (pytorch#25162). All ranks have the same
    work, because the batches are sorted by length.
    """
    own = batches[world.rank :: world.size]
    filler = [batches[-1][:1]] * (math.ceil(len(batches) / world.size) - len(own))
    loader: DataLoader[Any] = DataLoader(rows, batch_sampler=own + filler, **loader_options(collator, world.device))
    positions = [position for batch in own for position in batch]
    return EvalSet(name, labels, loader, [False] * len(own) + [True] * len(filler), positions)


def loader_options(collator: Callable[[list[Any]], Any], device: torch.device) -> dict[str, Any]:
    """Return the arguments that all loaders share. Their batches are copied to the device."""
    return {
        "collate_fn": collator,
        # With a generator of its own, iterating does not draw from the global random number generator.
        "generator": torch.Generator().manual_seed(0),
        "pin_memory": device.type == "cuda",
    }
