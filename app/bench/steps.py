"""Training steps of a model, without a run folder, and variants of a step, timed on the same batches.

All of them are `app.ddp_loop.train_step` itself, with all of its settings: precision, accumulation, clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import pandas as pd
import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from ..data.batches import BatchPlan, plan_batches
from ..ddp_loop import train_step
from ..distributed.collectives import raise_on_all_ranks
from ..distributed.world import World
from ..model.inputs import to_device
from ..setting_groups import TINY_BERT
from ..settings import Settings
from ..strategies.base import Strategy
from ..strategies.ddp import DDPStrategy
from ..strategies.optimization import LossScale, Optimization
from ..training.build import ReviewData, build_model, select_strategy
from ..training.step import build_optimizer, build_scheduler
from .core import Lab, alternate

TOTAL_STEPS = 10**6  # the schedule of timed steps never ends
STEP_SECONDS = 5  # for a variant of a training step, of which there are few, in multiples of --seconds_per_point

MakeStrategy = Callable[[Settings, BatchPlan, World], Strategy]
Variant = tuple[Settings, MakeStrategy]  # of a step: it differs from others in its settings or its strategy


@dataclass(frozen=True)
class Bench:
    """A model and its training batches."""

    settings: Settings
    world: World
    data: ReviewData
    strategy: Strategy
    model: PreTrainedModel
    wrapped: torch.nn.Module
    loader: DataLoader[Any]  # this rank's micro-batches: those of the training paths, unless replaced

    def optimization(self, total_steps: int) -> Optimization:
        """Return what updates the weights, as in training."""
        optimizer = build_optimizer(self.wrapped, self.settings, strategy=self.strategy)
        scheduler = build_scheduler(optimizer, self.settings, total_steps)
        return Optimization(optimizer, scheduler, LossScale(self.settings.precision, self.data.plan, self.world))

    def train_steps(
        self, micro_batches: Iterable[Any], optimization: Optimization, *, steps: int
    ) -> list[torch.Tensor]:
        """Train for a number of optimizer steps, and return the losses of each as `train_step` does."""
        iterator, losses = iter(micro_batches), []
        for step in range(steps):
            batches = islice(iterator, self.data.plan.micro_batches_per_step)
            inputs = [to_device(batch, self.model, self.world) for batch in batches]
            of_step, _ = train_step(
                self.wrapped, inputs, step, optimization=optimization, strategy=self.strategy, settings=self.settings
            )
            losses.append(of_step)
        return losses

    def micro_batches(self) -> Iterator[Any]:
        """Yield this rank's micro-batches of all epochs, in the order of a run."""
        for epoch in range(self.data.plan.epochs):
            self.loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            yield from self.loader


def build_bench(
    settings: Settings, data: ReviewData, world: World, *, make_strategy: MakeStrategy = select_strategy
) -> Bench:
    """Build a model, and prepare it for training as the training paths do. Collective."""
    model = build_model(settings, data, world).model
    with raise_on_all_ranks(world):
        data = replace(data, plan=plan_batches(settings, len(data.split.train), world.size))
    strategy = make_strategy(settings, data.plan, world)
    loader = data.train_loader(strategy.logical_ranks, settings, world)
    return Bench(settings, world, data, strategy, model, strategy.wrap(model), loader)


# ---- variants of a step ----------------------------------------------------------------------------------------------


class PlainDDP(DDPStrategy):
    """DDP without logical ranks, with its own all-reduce at any number of processes, and with buckets of any size."""

    def __init__(self, settings: Settings, plan: BatchPlan, world: World, *, mib: float | None = None) -> None:
        super().__init__(settings, plan, world)
        self.bucket_cap_mb = mib or self.bucket_cap_mb

    def fix_order(self) -> None:
        """Keep DDP's all-reduce."""


def plain_ddp(settings: Settings, **changes: Any) -> Settings:
    """Return the settings with `--strategy ddp` and gradients that are not compressed."""
    plain: dict[str, Any] = {"strategy": "ddp", "cpu_offload": False, "ddp_comm_hook": "no"}
    return replace(settings, **plain | {"param_dtype": "fp32", "reduce_dtype": "fp32"} | changes)


def time_steps(
    lab: Lab, variants: Mapping[str, Variant], *, micro_batches: int | None = None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Time variants of a training step, from the same weights. Collective.

    Variants whose micro-batches have the same number of rows train on the same ones.

    Args:
        micro_batches: of each logical rank, that a timed call trains on.

    Returns:
        A column for each variant: seconds per step in each round, and losses of two calls (the first update is by 0).
    """
    n = micro_batches or (8 if lab.settings.model == TINY_BERT else 2)
    calls: dict[str, Callable[[], list[torch.Tensor]]] = {}
    batches: dict[int, list[Any]] = {}  # by their number of rows
    steps = pd.Series(0, list(variants))
    for name, (settings, make_strategy) in variants.items():
        bench = build_bench(settings, lab.data, lab.world, make_strategy=make_strategy)
        plan = bench.data.plan
        steps[name] = max(1, n // plan.accumulation_steps)
        if plan.micro_size not in batches:
            batches[plan.micro_size] = list(islice(cycle(bench.loader), steps[name] * plan.micro_batches_per_step))
        optimization = bench.optimization(TOTAL_STEPS)
        calls[name] = partial(bench.train_steps, batches[plan.micro_size], optimization, steps=steps[name])
    losses = pd.DataFrame({name: pd.Series(torch.cat([*train(), *train()]).tolist()) for name, train in calls.items()})
    times = alternate(calls, STEP_SECONDS * lab.seconds, lab.world) / steps
    lab.page.numbers["seconds"] = times.to_dict("list")
    return times, losses
