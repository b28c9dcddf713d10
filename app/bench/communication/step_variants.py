"""Variants of a training step, timed in alternating rounds on the same micro-batches."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from ...data.sampler import BatchPlan
from ...distributed.collectives import all_gather_object
from ...distributed.world import Topology, World
from ...setting_groups import TINY_BERT
from ...settings import Settings
from ...strategies.base import Strategy
from ...strategies.ddp import DDPStrategy
from ...training.build import ReviewData, select_strategy
from ..rounds import Interval, ratios, time_calls
from ..steps import TOTAL_STEPS, PlainDDP, build_named, distribute, endless

MICRO_BATCHES = {TINY_BERT: 8}  # that a timed call trains on
MICRO_BATCHES_OF_OTHERS = 2
COMPARED_CALLS = 2  # whose losses are kept: each variant is called as often, or more often


@dataclass(frozen=True)
class Variant:
    """A kind of training step, which differs from the other variants in its settings or its strategy."""

    settings: Settings
    make_strategy: Callable[[Settings, BatchPlan, World], Strategy] = select_strategy


@dataclass(frozen=True)
class Comparison:
    """The times of variants."""

    model: str
    seconds: Mapping[str, Sequence[float]]  # per step of each variant, in each round, on the slowest rank
    # Of each variant: this rank's losses of the first micro-batches, which are the same rows.
    losses: Mapping[str, Sequence[float]] = field(default_factory=dict)
    tokens: Mapping[str, float] = field(default_factory=dict)  # per step of each variant, on all ranks, without padding

    def median(self, name: str) -> float:
        """Return the median time of a variant, in seconds per step."""
        return statistics.median(self.seconds[name])

    def relative(self, name: str) -> Interval:
        """Return the time of a variant, relative to the first one."""
        return ratios(self.seconds[name], next(iter(self.seconds.values())))


def models(name: str) -> list[str]:
    """Return the names of the models to measure: the one that `--model` names, or two sizes."""
    return [TINY_BERT, "BERT 4 x 312"] if name == TINY_BERT else [name]


def in_one_level(settings: Settings, plan: BatchPlan, world: World) -> DDPStrategy:
    """Return DDP that sums gradients over all ranks at once, as if they were on one node."""
    return DDPStrategy(settings, plan, replace(world, node_groups=()))


def reduction_variants(settings: Settings, topology: Topology) -> dict[str, Variant]:
    """Return plain all-reduce, and the fixed order with as many logical ranks as processes and with twice as many.

    Where gradients are summed inside the nodes first, the sum over all ranks at once is a variant too.
    """
    ranks = topology.ranks
    variants = {"plain all-reduce": Variant(replace(settings, logical_ranks=None), PlainDDP)}
    if topology.two_levels:
        variants["in one level"] = Variant(replace(settings, logical_ranks=ranks), in_one_level)
    for n in (ranks, 2 * ranks):
        if n == ranks or n & (n - 1) == 0:  # `plan_batches` accepts no others
            variants[f"{n} logical ranks"] = Variant(replace(settings, logical_ranks=n))
    return variants


def compare(
    model: str,
    variants: Mapping[str, Variant],
    data: ReviewData,
    *,
    seconds: float,
    world: World,
    micro_batches: int | None = None,
) -> Comparison:
    """Time variants of a training step of a model. Collective.

    Variants whose micro-batches have the same number of rows train on the same ones.

    Args:
        seconds: about how long to time each variant.
        micro_batches: of each logical rank, that a call trains on.
    """
    n = micro_batches or MICRO_BATCHES.get(model, MICRO_BATCHES_OF_OTHERS)
    calls: dict[str, Callable[[], object]] = {}
    steps: dict[str, int] = {}
    tokens: dict[str, float] = {}
    batches: dict[int, list[Any]] = {}  # by their number of rows
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in variants}
    for name, variant in variants.items():
        network = build_named(model, variant.settings, data, world=world)
        bench = distribute(variant.settings, data, network, world=world, make_strategy=variant.make_strategy)
        plan = bench.data.plan
        steps[name] = max(1, n // plan.accumulation_steps)
        if plan.micro_size not in batches:
            batches[plan.micro_size] = list(islice(endless(bench.loader), steps[name] * plan.micro_batches_per_step))
        masks = [batch.get("attention_mask", batch["input_ids"] >= 0) for batch in batches[plan.micro_size]]
        tokens[name] = sum(int(mask.sum()) for mask in masks) / steps[name]
        optimization = bench.optimization(TOTAL_STEPS)
        train = partial(bench.train_steps, batches[plan.micro_size], optimization, steps=steps[name])
        calls[name] = partial(train_and_keep_losses, train, losses[name], COMPARED_CALLS * steps[name])
    disable_tqdm = next(iter(variants.values())).settings.disable_tqdm
    times = time_calls(calls, seconds, world, disable_tqdm=disable_tqdm)
    return Comparison(
        model,
        {name: [seconds / steps[name] for seconds in rounds] for name, rounds in times.items()},
        {name: torch.cat(kept).tolist() for name, kept in losses.items()},
        {name: sum(of_rank[name] for of_rank in all_gather_object(tokens, world)) for name in variants},
    )


def train_and_keep_losses(train: Callable[[], list[torch.Tensor]], kept: list[torch.Tensor], most: int) -> None:
    """Train, and add the losses of the steps to `kept` until it has `most`."""
    losses = train()
    kept += losses[: most - len(kept)]
