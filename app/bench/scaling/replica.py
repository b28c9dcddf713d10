"""A model that a rank trains under a strategy, with or without the exchanges between the ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from ...data.sampler import plan_batches
from ...ddp_loop import Batch, train_step
from ...distributed.world import World
from ...model.inputs import to_device
from ...settings import WRAPPED_IN_DDP, Settings
from ...strategies.optimization import LossScale, Optimization
from ...strategies.reduction import sum_pairwise
from ...training.build import select_strategy
from ...training.step import build_optimizer, build_scheduler
from .models import build_classifier

LEARNING_RATE = 1e-5
MANY_STEPS = 1_000_000  # for the schedule, which has to know how many steps there will be at most
Moment = float | torch.cuda.Event


def now(world: World) -> Moment:
    """Return this moment, on the clock of the rank's device: on a GPU, when what has been enqueued is done."""
    if world.device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Moment, end: Moment) -> float:
    """Return the seconds between two moments. On a GPU, they must have passed (`wait_for_device`)."""
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return float(begin.elapsed_time(end)) / 1000
    assert isinstance(end, float)
    return end - begin


class Replica:
    """A model with its optimizer, which trains on batches of any number of rows.

    Args:
        exchange: whether the ranks exchange gradients and parameters. Without it, there have to be two ranks.
    """

    def __init__(self, name: str, strategy: str, *, exchange: bool, settings: Settings, world: World) -> None:
        settings = replace(settings, strategy=strategy)  # type: ignore[arg-type]
        self.settings, self.world, self.steps = settings, world, 0
        # Without exchange, for each bucket of each step: its bytes, and when it was ready.
        self.ready: list[tuple[int, Moment]] = []
        plan = plan_batches(settings, n_train=settings.train_batch_size, world_size=world.size)
        self.strategy = select_strategy(settings, plan, world)
        self.model = build_classifier(name, settings)
        self.wrapped = self.strategy.wrap(self.model)
        optimizer = build_optimizer(self.wrapped, settings, LEARNING_RATE, strategy=self.strategy)
        if not exchange:
            self._exchange_nothing(optimizer)
        scheduler = build_scheduler(optimizer, settings, MANY_STEPS)
        self.optimization = Optimization(optimizer, scheduler, LossScale(settings.precision, plan, world))

    def _exchange_nothing(self, optimizer: torch.optim.Optimizer) -> None:
        if self.settings.strategy in WRAPPED_IN_DDP:
            # DDP accepts a single hook, and with more than two ranks the strategy has registered its own. A lambda,
            # because DDP rejects hooks whose annotations are strings.
            self.wrapped.register_comm_hook(self, lambda replica, bucket: replica.record_bucket(bucket))  # type: ignore[operator]
            if self.strategy.shards_optimizer:
                optimizer._sync_params = lambda: None  # type: ignore[attr-defined]
            return
        for module in self.wrapped.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(OwnShardOnly())
                module.set_custom_reduce_scatter(OwnGradientsOnly())

    def record_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Record that a bucket of gradients is ready, as a communication hook that sends nothing."""
        self.ready.append((bucket.buffer().nbytes, now(self.world)))
        return noop_hook(None, bucket)

    def train(self, batch: Batch, steps: int) -> list[Moment]:
        """Train on a batch several times; return when each step began. Collective."""
        started = []
        for _ in range(steps):
            started.append(now(self.world))
            train_step(
                self.wrapped,
                [to_device(batch, self.model, self.world)],
                self.steps,
                optimization=self.optimization,
                strategy=self.strategy,
                settings=self.settings,
            )
            self.steps += 1
        return started

    def random_batch(self, rows: int, length: int) -> Batch:
        """Return rows of random tokens, which differ between ranks."""
        generator = torch.Generator().manual_seed(self.world.rank)
        tokens = torch.randint(self.model.config.vocab_size, (rows, length), generator=generator)
        labels = torch.randint(2, (rows,), generator=generator)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


class _WithoutMessages:
    """FSDP2's collectives without messages: all copies in memory remain, so that only the exchange is missing."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class OwnShardOnly(_WithoutMessages, AllGather):
    """An all-gather that takes this rank's shard for the shards of all ranks, which are finite numbers, too."""

    def __call__(  # noqa: PLR0917 (the caller's signature)
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        # On a CPU, the shard is already in its place.
        for shard in output_tensor.view(group.size(), -1):
            if shard.data_ptr() != input_tensor.data_ptr():
                shard.copy_(input_tensor)


class OwnGradientsOnly(_WithoutMessages, ReduceScatter):
    """A reduce-scatter that adds zeros instead of the gradients of the other ranks: see `reduce_scatter_pairwise`."""

    def __call__(  # noqa: PLR0917 (the caller's signature)
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        rows = input_tensor.view(group.size(), -1)
        received = torch.zeros_like(rows)
        received[group.rank()] = rows[group.rank()]
        output_tensor.copy_(sum_pairwise(received).div_(group.size()))
