"""Sections on a training step: where its time goes, and what settings of DDP change.

They time `app.ddp_loop.train_step`, and follow section 5 of Li et al. 2020, "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training". The docstring of a section is its title and its text on the page.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
import torch

from ..common.formats import mib, points
from ..data.batches import plan_batches
from ..ddp_loop import evaluate
from ..distributed.collectives import all_gather_object, raise_on_all_ranks, wait_for_device
from ..distributed.world import World
from ..model.inputs import to_device
from ..model.load import mixed_precision
from ..profiling.breakdown import EXPOSED, divide_steps
from ..profiling.profiler import FIRST, start_profiler
from ..report.statistics import paired
from ..settings import Settings
from ..training.build import ReviewData, build_data, select_strategy
from ..training.step import peak_learning_rate
from .core import Lab, compared, format_seconds
from .steps import TOTAL_STEPS, PlainDDP, Variant, build_bench, plain_ddp, time_steps

PROFILED_STEPS = 5
SYNC_EVERY = (1, 2, 4, 8)  # micro-batches
PASSES, WARM_UP = 10, 2  # backward passes
MICRO_BATCHES = 160  # of a training on each rank, unless --max_steps is set
HOOKS = {hook: hook for hook in ("no", "fp16", "bf16", "power_sgd")}


def breakdown(lab: Lab) -> None:
    """Where the time of a step goes

    From a profile of 5 steps, which the profiler slows down. The mean of all ranks. Communication is exposed in the
    moments in which a collective is in flight and the rank computes nothing; otherwise it is hidden.
    """
    bench = build_bench(lab.settings, lab.data, lab.world)
    optimization, batches = bench.optimization(TOTAL_STEPS), cycle(bench.loader)
    profiler = start_profiler(PROFILED_STEPS, lab.world.device)
    for step in range(FIRST - 1 + PROFILED_STEPS):
        if step:
            profiler.step()
        bench.train_steps(batches, optimization, steps=1)
    profiler.stop()
    of_ranks = all_gather_object(divide_steps(profiler.events()).mean(), lab.world)
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

    DDP walks through the graph of each forward pass, and the ranks exchange which parameters they have used. This model
    uses all of them, so the difference is pure overhead.
    """
    compare_steps(lab, vary(plain_ddp(lab.settings), "ddp_find_unused_parameters", {"off": False, "on": True}))


def compression(lab: Lab) -> None:
    """Compressed gradients

    Each --ddp_comm_hook, without the first steps of PowerSGD, which are not compressed. app.bench.traffic prints the
    bytes that a step sends with it.
    """
    # PowerSGD compresses from the third step on, because 10% of so few steps is less than its minimum of 2. A call that
    # is timed is preceded by two others.
    strategy = "zero1" if lab.settings.strategy == "zero1" else "ddp"
    with raise_on_all_ranks(lab.world):
        variants = vary(plain_ddp(lab.settings, strategy=strategy, max_steps=3), "ddp_comm_hook", HOOKS)
    compare_steps(lab, variants)


def no_sync(lab: Lab) -> None:
    """Skipped synchronization

    Gradients are exchanged for every k-th micro-batch, as in gradient accumulation. A micro-batch also has 1/k of the
    clipping and of the update, so not all of the difference is communication.
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

    The order of additions of an all-reduce depends on the number of ranks, that of the fixed tree
    (docs/same_bits.md#the-fixed-tree) does not: the difference is what equal bits cost.
    """
    plain, ranks = plain_ddp(lab.settings), lab.world.size
    variants: dict[str, Variant] = {"plain all-reduce": (replace(plain, logical_ranks=None), PlainDDP)}
    for n in (ranks, 2 * ranks):
        if n == ranks or n & (n - 1) == 0:  # `plan_batches` accepts no others
            variants[f"{n} logical ranks"] = (replace(plain, logical_ranks=n), select_strategy)
    compare_steps(lab, variants)


# ---- when gradients are ready ----------------------------------------------------------------------------------------


def readiness(lab: Lab) -> None:
    """When gradients are ready

    A backward pass without communication on every rank: figure 2 (c, d) of the paper. DDP can send a gradient as soon
    as it is ready. The embeddings are ready last, so what they send cannot be hidden, whatever the size of the buckets.
    """
    bench = build_bench(plain_ddp(lab.settings), lab.data, lab.world)
    parameters = {name: p for name, p in bench.model.named_parameters() if p.requires_grad}
    moments: dict[str, float] = {}

    def record(name: str, _: torch.Tensor) -> None:
        wait_for_device(lab.world)
        moments[name] = time.perf_counter()

    for name, parameter in parameters.items():
        parameter.register_post_accumulate_grad_hook(partial(record, name))
    # The same batch again and again, because others have other lengths, and take other times.
    batch = to_device(next(iter(bench.loader)), bench.model, lab.world)
    passes = []
    bench.model.train()
    for _ in range(WARM_UP + PASSES):
        with mixed_precision(bench.settings.precision, lab.world.device):
            loss = bench.model(**batch).loss
        wait_for_device(lab.world)
        began = time.perf_counter()
        loss.backward()
        passes.append({name: moment - began for name, moment in moments.items()})  # an unused parameter has none
        bench.model.zero_grad()
    # The median of the passes, on the slowest rank.
    of_ranks = all_gather_object(pd.DataFrame(passes[WARM_UP:]).median(), lab.world)
    seconds = pd.concat(of_ranks, axis=1).max(axis=1).sort_values()
    sizes = [parameters[name].nbytes for name in seconds.index]
    half = np.searchsorted(np.cumsum(sizes), sum(sizes) / 2)
    times = [seconds.iloc[0], seconds.iloc[half], seconds.iloc[-1]]
    row = pd.Series([mib(sum(sizes)), *map(format_seconds, times)], ["MiB", "first", "half", "all"])
    lab.page.table("Gradients that are ready", row.to_frame("gradients").T)
    lab.page.numbers |= {"seconds": seconds.to_dict(), "bytes": dict(zip(seconds.index, sizes, strict=True))}


# ---- trainings to the end --------------------------------------------------------------------------------------------


def convergence(lab: Lab) -> None:
    """Skipped synchronization: convergence

    Trainings on the same number of rows, in which gradients are exchanged for every k-th micro-batch. A seed determines
    split, initial weights, order and dropout, so all variants of a seed are paired. With k micro-batches per exchange,
    a training has 1/k of the updates, once with the same learning rate, and once with k times as much.
    """
    data, settings = lab.data, plain_ddp(lab.settings, logical_ranks=None)
    with raise_on_all_ranks(lab.world):
        replace(settings, seed=settings.seed + lab.seeds - 1)  # raises if it is too large
        plan = plan_batches(settings, len(data.split.train), lab.world.size)
    rows = plan.global_size // plan.accumulation_steps
    rate = peak_learning_rate(settings)
    most = max(SYNC_EVERY)
    micro_batches = max(1, (settings.max_steps if settings.max_steps > 0 else MICRO_BATCHES) // most) * most
    variants = {}
    for k in (k for k in SYNC_EVERY if k * rows <= len(data.split.train)):
        lengths: dict[str, Any] = {"gradient_accumulation_steps": k, "max_steps": micro_batches // k}
        varied = replace(settings, per_device_train_batch_size=None, train_batch_size=k * rows, **lengths)
        variants[every(k)] = replace(varied, learning_rate=rate)
        if k > 1:
            variants[f"{every(k)}, lr × {k}"] = replace(varied, learning_rate=k * rate)
    accuracies, losses = train_all(lab, variants)
    table = pd.DataFrame({"updates": {name: varied.max_steps for name, varied in variants.items()}})
    # Of the last rows, which are the same ones for all variants: a twentieth of the training.
    lasts = [np.mean([of_seed[-max(1, len(of_seed) // 20) :] for of_seed in losses[name]]) for name in variants]
    table["last loss"] = [f"{loss:.4f}" for loss in lasts]
    table["accuracy"] = accuracies.mean().map("{:.2%}".format)
    table["difference, points"] = [describe_difference(accuracies, name) for name in variants]
    lab.page.table("Losses and accuracies", table)
    lab.page.numbers |= {"losses": losses, "accuracies": accuracies.to_dict("list")}


def describe_difference(accuracies: pd.DataFrame, name: str) -> str:
    """Return a variant's difference from the first one, with its 95% confidence interval, in percentage points."""
    if name == accuracies.columns[0]:
        return ""
    compared = paired(accuracies[name], accuracies.iloc[:, 0])
    shown, interval = points(compared.mean_a - compared.mean_b), compared.difference
    return shown if interval is None else f"{shown} [{points(interval['low'])}, {points(interval['high'])}]"


def train_all(lab: Lab, variants: Mapping[str, Settings]) -> tuple[pd.DataFrame, dict[str, list[list[float]]]]:
    """Train with each variant and seed; return the accuracies by seed, and the losses of the steps. Collective."""
    accuracies = pd.DataFrame(columns=list(variants), dtype=float)
    losses: dict[str, list[list[float]]] = {name: [] for name in variants}
    first = lab.settings.seed
    for seed in range(first, first + lab.seeds):
        data = lab.data
        if seed != first:
            data = build_data(replace(lab.settings, seed=seed, disable_tqdm=True), lab.world)
        for name, varied in variants.items():
            accuracies.loc[seed, name], of_steps = train(replace(varied, seed=seed), data, lab.world)
            losses[name].append(of_steps)
            gc.collect()  # DDP's modules are part of reference cycles, and each holds a complete model
    return accuracies, losses


def train(settings: Settings, data: ReviewData, world: World) -> tuple[float, list[float]]:
    """Train as `app.ddp_loop` does; return the accuracy of the test rows, and the loss of each step. Collective."""
    bench = build_bench(settings, data, world)
    steps = bench.data.plan.total_steps
    own = torch.stack(bench.train_steps(bench.micro_batches(), bench.optimization(steps), steps=steps)).mean(dim=1)
    losses = np.mean(all_gather_object(own.tolist(), world), axis=0).tolist()
    scores, _ = evaluate(bench.model, data.eval_set("test", settings, world), settings, world=world)
    return scores.accuracy, losses
