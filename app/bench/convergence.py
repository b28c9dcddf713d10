"""A section that trains to the end: what skipped synchronization costs in accuracy.

A seed determines split, initial weights, order and dropout, so all variants of a seed are paired.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from ..common.formats import points
from ..common.terminal import hides_progress
from ..data.sampler import plan_batches
from ..ddp_loop import evaluate
from ..distributed.collectives import all_gather_object, raise_on_all_ranks
from ..distributed.world import World
from ..report.statistics import paired
from ..settings import Settings
from ..training.build import ReviewData, build_data, build_model
from ..training.step import default_learning_rate
from .core import Lab
from .sections import SYNC_EVERY, every
from .steps import build_bench, plain_ddp

MICRO_BATCHES = 160  # of a training on each rank, unless --max_steps is set
POINTS = 20  # of a loss curve, each of which is a mean


def convergence(lab: Lab) -> None:
    """Skipped synchronization: convergence

    Trainings on the same number of rows, in which gradients are exchanged for every k-th micro-batch:
    docs/communication.md#does-skipped-synchronization-converge explains them.
    """
    data, settings = lab.data, plain_ddp(lab.settings, logical_ranks=None)
    with raise_on_all_ranks(lab.world):
        replace(settings, seed=settings.seed + lab.seeds - 1)  # raises if it is too large
        plan = plan_batches(settings, len(data.split.train), lab.world.size)
    rows = plan.global_size // plan.accumulation_steps
    pretrained = build_model(settings, data, lab.world).pretrained
    rate = settings.learning_rate or default_learning_rate(pretrained)
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
    curves = pd.DataFrame(dtype=float)
    for name, varied in variants.items():
        rows_seen = np.arange(1, varied.max_steps + 1) * varied.train_batch_size
        by_row = pd.Series(np.mean(losses[name], axis=0), rows_seen, name=name)
        smooth = by_row.rolling(max(1, len(by_row) // POINTS)).mean()
        curves = curves.join(smooth, how="outer")
    table = pd.DataFrame({"updates": {name: varied.max_steps for name, varied in variants.items()}})
    table["last loss"] = curves.iloc[-1].map("{:.4f}".format)
    table["accuracy"] = accuracies.mean().map("{:.2%}".format)
    table["difference, points"] = [describe_difference(accuracies, name) for name in variants]
    lab.page.table("Losses and accuracies", table)
    lab.page.chart("Loss", curves.rename_axis("rows"), "loss")
    lab.page.numbers |= {"losses": losses, "accuracies": accuracies.to_dict("list")}


def describe_difference(accuracies: pd.DataFrame, name: str) -> str:
    """Return a variant's difference from the first one, with its 95% confidence interval, in percentage points."""
    if name == accuracies.columns[0]:
        return ""
    compared = paired(accuracies[name], accuracies.iloc[:, 0])
    shown, interval = points(compared.mean_a - compared.mean_b), compared.difference
    return shown if interval is None else f"{shown} [{points(interval.low)}, {points(interval.high)}]"


def train_all(lab: Lab, variants: Mapping[str, Settings]) -> tuple[pd.DataFrame, dict[str, list[list[float]]]]:
    """Train with each variant and seed; return the accuracies by seed, and the losses of the steps. Collective."""
    accuracies = pd.DataFrame(columns=list(variants), dtype=float)
    losses: dict[str, list[list[float]]] = {name: [] for name in variants}
    first = lab.settings.seed
    hide_bar = hides_progress(lab.settings.disable_tqdm, lab.world.is_main_process)
    for seed in tqdm(range(first, first + lab.seeds), "seeds", disable=hide_bar, leave=False):
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
    assert settings.learning_rate is not None
    bench = build_bench(settings, data, world)
    steps = bench.data.plan.total_steps
    optimization = bench.optimization(steps, settings.learning_rate)
    own = torch.stack(bench.train_steps(bench.micro_batches(), optimization, steps=steps)).mean(dim=1)
    losses = np.mean(all_gather_object(own.tolist(), world), axis=0).tolist()
    scores, _ = evaluate(bench.model, data.eval_set("test", settings, world), settings, world=world)
    return scores.accuracy, losses
