"""Sections on a training step: where its time goes, and what settings of DDP change.

They time `app.ddp_loop.train_step`, and follow section 5 of Li et al. 2020, "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training". The docstring of a section is its title and its text on the page.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
import torch

from ..common.formats import mib
from ..data.sampler import BatchPlan, plan_batches
from ..distributed.collectives import all_gather_object, raise_on_all_ranks, wait_for_device
from ..distributed.world import World
from ..model.inputs import to_device
from ..model.precision import mixed_precision
from ..profiling.breakdown import EXPOSED, divide_steps
from ..profiling.profiler import FIRST, events_of, start_profiler
from ..settings import Settings
from ..strategies.ddp import DDPStrategy
from ..training.build import select_strategy
from .core import Lab, compared, format_seconds
from .steps import (
    TOTAL_STEPS,
    Bench,
    PlainDDP,
    Variant,
    build_bench,
    plain_ddp,
    time_steps,
)

PROFILED_STEPS = 5
SYNC_EVERY = (1, 2, 4, 8)  # micro-batches
PASSES, WARM_UP = 10, 2  # backward passes
HOOKS = {hook: hook for hook in ("no", "fp16", "bf16", "power_sgd")}


def breakdown(lab: Lab) -> None:
    """Where the time of a step goes

    From a profile of 5 steps, which the profiler slows down. The mean of all ranks.
    docs/communication.md#where-the-time-of-a-step-goes---profile defines the parts.
    """
    bench = build_bench(lab.settings, lab.data, lab.world)
    optimization, batches = bench.optimization(TOTAL_STEPS), cycle(bench.loader)
    profiler = start_profiler(PROFILED_STEPS, lab.world.device)
    for step in range(FIRST - 1 + PROFILED_STEPS):
        if step:
            profiler.step()
        bench.train_steps(batches, optimization, steps=1)
    profiler.stop()
    of_ranks = all_gather_object(divide_steps(events_of(profiler)).mean(), lab.world)
    parts = pd.concat(of_ranks, axis=1).mean(axis=1)
    parts["of which hidden"] = parts["communication"] - parts[EXPOSED]
    share = (parts / parts["step"]).map("{:.1%}".format)
    if parts["communication"]:
        share["of which hidden"] = f"{parts['of which hidden'] / parts['communication']:.0%}"
    lab.page.table(f"Parts of a step: {lab.settings.strategy}", pd.DataFrame({"ms": parts, "share": share}))
    lab.page.numbers["milliseconds"] = parts.to_dict()


# ---- variants of a step ----------------------------------------------------------------------------------------------


def compare_steps(
    lab: Lab, variants: Mapping[str, Variant], *, unit: str = "step", units: Mapping[str, int] | None = None
) -> None:
    """Show how long the variants of a step take, relative to the first one. Collective.

    Args:
        units: how many of another unit are in a step of each variant, of which the time is then shown.
    """
    times, _ = time_steps(lab, variants, micro_batches=max(SYNC_EVERY) if units else None)
    lab.page.table(f"Time per {unit}", compared(times / pd.Series(units or 1, times.columns), unit))


def vary(settings: Settings, field: str, values: Mapping[str, Any]) -> dict[str, Variant]:
    """Return steps that differ in one setting, whose value each name has."""
    return {name: (replace(settings, **{field: value}), select_strategy) for name, value in values.items()}


def unused_parameters(lab: Lab) -> None:
    """Searching for unused parameters

    docs/communication.md#a-training-step explains why the difference is pure overhead.
    """
    compare_steps(lab, vary(plain_ddp(lab.settings), "ddp_find_unused_parameters", {"off": False, "on": True}))


def compression(lab: Lab) -> None:
    """Compressed gradients

    Each --ddp_comm_hook. docs/communication.md#compressed-gradients.
    """
    # PowerSGD compresses from the third step on, because 10% of so few steps is less than its minimum of 2. A call that
    # is timed is preceded by two others.
    strategy = "zero1" if lab.settings.strategy == "zero1" else "ddp"
    with raise_on_all_ranks(lab.world):
        variants = vary(plain_ddp(lab.settings, strategy=strategy, max_steps=3), "ddp_comm_hook", HOOKS)
    compare_steps(lab, variants)


def no_sync(lab: Lab) -> None:
    """Skipped synchronization

    docs/communication.md#a-training-step explains why not all of the difference is communication.
    """
    plain = plain_ddp(lab.settings)
    n_train = len(lab.data.split.train)
    with raise_on_all_ranks(lab.world):
        plan = plan_batches(plain, n_train, lab.world.size)
    rows = plan.global_size // plan.accumulation_steps  # of one micro-batch on all ranks
    plain = replace(plain, per_device_train_batch_size=None)
    variants = {
        every(k): (replace(plain, train_batch_size=k * rows, gradient_accumulation_steps=k), select_strategy)
        for k in SYNC_EVERY
        if k * rows <= n_train
    }
    units = {name: settings.gradient_accumulation_steps for name, (settings, _) in variants.items()}
    compare_steps(lab, variants, unit="micro-batch", units=units)


def every(k: int) -> str:
    return f"every {k}" if k > 1 else "every one"


def reduction(lab: Lab) -> None:
    """Plain all-reduce and fixed tree

    docs/same_bits.md#the-tree describes the fixed tree.
    """
    plain, ranks, topology = plain_ddp(lab.settings), lab.world.size, lab.world.topology
    variants: dict[str, Variant] = {"plain all-reduce": (replace(plain, logical_ranks=None), PlainDDP)}
    if topology.two_levels:
        variants["in one level"] = (replace(plain, logical_ranks=ranks), in_one_level)
    for n in (ranks, 2 * ranks):
        if n == ranks or n & (n - 1) == 0:  # `plan_batches` accepts no others
            variants[f"{n} logical ranks"] = (replace(plain, logical_ranks=n), select_strategy)
    compare_steps(lab, variants)


def in_one_level(settings: Settings, plan: BatchPlan, world: World) -> DDPStrategy:
    """Return DDP that sums gradients over all ranks at once, as if they were on one node."""
    return DDPStrategy(settings, plan, replace(world, node_groups=()))


# ---- when gradients are ready ----------------------------------------------------------------------------------------


def readiness(lab: Lab) -> None:
    """When gradients are ready

    A backward pass without communication on every rank: figure 2 (c, d) of the paper.
    docs/communication.md#readiness.
    """
    sizes, ready = ready_gradients(lab, build_bench(plain_ddp(lab.settings), lab.data, lab.world))
    done = np.cumsum(sizes)
    times = [ready[0], ready[np.searchsorted(done, done[-1] / 2)], ready[-1]]
    row = pd.Series([mib(done[-1]), *map(format_seconds, times)], ["MiB", "first", "half", "all"])
    lab.page.table("Gradients that are ready", row.to_frame("gradients").T)
    share = pd.DataFrame({"gradients": 100 * done / done[-1]}, pd.Index(1000 * ready, name="ms of the backward pass"))
    lab.page.chart("Gradients that are ready", share, "share of the bytes, %")
    lab.page.numbers |= {"seconds": ready.tolist(), "bytes": sizes.tolist()}


def ready_gradients(lab: Lab, bench: Bench) -> tuple[Any, Any]:
    """Return the bytes of each gradient, and the seconds from the beginning of the backward pass, in this order.

    The seconds are the median over the passes, on the slowest rank. Collective.
    """
    parameters = {name: p for name, p in bench.model.named_parameters() if p.requires_grad}
    moments: dict[str, float] = {}

    def record(name: str, _: torch.Tensor) -> None:
        wait_for_device(lab.world)
        moments[name] = time.perf_counter()

    hooks = [p.register_post_accumulate_grad_hook(partial(record, name)) for name, p in parameters.items()]
    # The same batch again and again, because others have other lengths, and take other times.
    batch = to_device(next(iter(bench.loader)), bench.model, lab.world)
    passes = []
    bench.model.train()
    for _ in range(PASSES + WARM_UP):
        with mixed_precision(bench.settings.precision, lab.world.device):
            loss = bench.model(**batch).loss
        wait_for_device(lab.world)
        began = time.perf_counter()
        loss.backward()
        passes.append([moments[name] - began if name in moments else np.nan for name in parameters])
        bench.model.zero_grad()
    for hook in hooks:
        hook.remove()
    seconds = np.median(all_gather_object(passes[WARM_UP:], lab.world), axis=1).max(axis=0)
    sizes = np.array([p.numel() * p.element_size() for p in parameters.values()])
    order = np.argsort(seconds)[: int(np.isfinite(seconds).sum())]  # NaN, of an unused parameter, is sorted last
    return sizes[order], seconds[order]
