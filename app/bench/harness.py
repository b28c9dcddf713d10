"""Code that the benchmarks share: set up a model and its training batches on all ranks, and time training steps.

The benchmarks time `app.ddp_loop.train_step` itself, with all of its settings: precision, accumulation, clipping.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from app.ddp_loop import train_step
from app.distributed.collectives import reduce_mean
from app.distributed.world import World
from app.settings import Settings
from app.strategies.base import Strategy
from app.strategies.ddp import DDP
from app.training.build import ReviewData, build_data, build_model
from app.training.console import quiet_libraries


@dataclass(frozen=True)
class Bench:
    """A model and its training batches.

    Attributes:
        loader: this rank's micro-batches, as the training paths get them.
    """

    settings: Settings
    world: World
    data: ReviewData
    strategy: Strategy
    model: torch.nn.Module
    wrapped: torch.nn.Module
    loader: DataLoader[Any]

    def train_steps(
        self, micro_batches: Iterable[Any], optimizer: torch.optim.Optimizer, scheduler: LRScheduler, steps: int
    ) -> None:
        """Train for a number of optimizer steps."""
        iterator = iter(micro_batches)
        for _ in range(steps):
            batches = list(islice(iterator, self.data.plan.accumulation_steps))
            train_step(self.wrapped, batches, optimizer, scheduler, self.strategy, self.settings, self.world)


def set_up(settings: Settings, world: World) -> Bench:
    """Build the data and the model, without a run folder. Collective."""
    quiet_libraries(world)
    data = build_data(settings, world)
    model = build_model(settings, data, world).model
    strategy = DDP(settings, world)
    return Bench(settings, world, data, strategy, model, strategy.wrap(model), data.train_loader(settings, world))


def timed(work: Callable[[], None], world: World) -> float:
    """Return the time that the work takes in seconds, averaged over the ranks. Collective."""
    started = time.perf_counter()
    work()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64, device=world.device)
    return float(reduce_mean(seconds, world))
