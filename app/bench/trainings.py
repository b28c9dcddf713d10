"""Sections that train to the end: what compressed gradients, and skipped synchronization, cost in accuracy.

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
from scipy.stats import ttest_rel
from tqdm import tqdm

from ..common.errors import UserError
from ..common.formats import format_size
from ..common.terminal import hides_progress
from ..data.sampler import plan_batches
from ..ddp_loop import evaluate
from ..distributed.collectives import all_gather_object, raise_on_all_ranks
from ..distributed.world import World
from ..settings import Settings
from ..training.build import ReviewData, build_data, build_model, select_strategy
from ..training.step import default_learning_rate
from .core import Lab, compared
from .sections import SYNC_EVERY, every
from .steps import distribute, models, plain_ddp, time_steps
from .traffic import STEPS, count_third_step, sent_bytes

HOOKS = ("no", "fp16", "bf16", "power_sgd")  # the values of --ddp_comm_hook
MOST_STEPS = 150  # of a training with a hook, unless --max_steps is set
MICRO_BATCHES = 160  # of a training with skipped synchronization on each rank, unless --max_steps is set
POINTS = 20  # of a loss curve, each of which is a mean


def compression(lab: Lab) -> None:
    """Compressed gradients

    Time and bytes of a step with each --ddp_comm_hook, and the accuracy of the test rows after up to 150 steps:
    docs/communication.md#compressed-gradients explains them and their intervals.
    """
    data, world = lab.reviews, lab.world
    plain = plain_ddp(lab.settings, strategy="zero1" if lab.settings.strategy == "zero1" else "ddp")
    by_hook, total = {}, data.plan.total_steps
    with raise_on_all_ranks(world):
        for hook in HOOKS:
            try:
                by_hook[hook] = replace(plain, ddp_comm_hook=hook)  # type: ignore[arg-type]
                plan_batches(by_hook[hook], len(data.split.train), world.size)
            except UserError as problem:
                if hook != "power_sgd":
                    raise
                by_hook.pop(hook, None)
                lab.page.note(f"power_sgd is left out: {problem}.")
    # PowerSGD compresses from the third step on, because 10% of so few steps is less than its minimum of 2. A call that
    # is timed is preceded by two others.
    short = {hook: replace(hooked, max_steps=STEPS) for hook, hooked in by_hook.items()}
    variants = {hook: (hooked, select_strategy) for hook, hooked in short.items()}
    frame = compared(time_steps(lab, models(lab.settings)[0], variants)[0])
    gc.collect()  # DDP's modules are part of reference cycles, and each holds a complete model
    sent = pd.Series(0.0, frame.index)
    for hook, hooked in short.items():
        bench = distribute(hooked, data, build_model(hooked, data, world).model, world=world)
        sent[hook] = sent_bytes(count_third_step(bench), world.topology)
    frame["sent per step"] = sent.map(format_size)
    frame["share"] = (sent / sent["no"]).map("{:.1%}".format) if sent["no"] else "–"
    steps = lab.settings.max_steps if lab.settings.max_steps > 0 else min(MOST_STEPS, total)
    trained = train_all(lab, {hook: replace(hooked, max_steps=steps) for hook, hooked in by_hook.items()})
    lab.page.table("Time, bytes and accuracy", frame.join(accuracies(trained)))
    lab.page.numbers["bytes_sent_per_step"] = sent.to_dict()


def convergence(lab: Lab) -> None:
    """Skipped synchronization: convergence

    Trainings on the same number of rows, in which gradients are exchanged for every k-th micro-batch:
    docs/communication.md#does-skipped-synchronization-converge explains them.
    """
    data, settings = lab.reviews, plain_ddp(lab.settings, logical_ranks=None)
    with raise_on_all_ranks(lab.world):
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
    trained = train_all(lab, variants)
    curves = pd.DataFrame(dtype=float)
    for name, results in trained.items():
        rows_seen = np.arange(1, variants[name].max_steps + 1) * variants[name].train_batch_size
        by_row = pd.Series(np.mean([losses for _, losses in results], axis=0), rows_seen, name=name)
        smooth = by_row.rolling(max(1, len(by_row) // POINTS)).mean()
        curves = curves.join(smooth, how="outer")
    frame = pd.DataFrame({"updates": {name: varied.max_steps for name, varied in variants.items()}})
    frame["last loss"] = curves.iloc[-1].map("{:.4f}".format)
    lab.page.table("Losses and accuracies", frame.join(accuracies(trained)))
    lab.page.chart("Loss", curves.rename_axis("rows"), "loss")
    lab.page.numbers["losses"] = {name: [losses for _, losses in results] for name, results in trained.items()}


Results = list[tuple[float, list[float]]]  # of each seed: the accuracy of the test rows, and the loss of each step


def train_all(lab: Lab, variants: Mapping[str, Settings]) -> dict[str, Results]:
    """Train with each variant and seed, and keep the accuracies in the JSON file. Collective."""
    results: dict[str, Results] = {name: [] for name in variants}
    first = lab.settings.seed
    hide_bar = hides_progress(lab.settings.disable_tqdm, lab.world.is_main_process)
    with raise_on_all_ranks(lab.world):
        replace(lab.settings, seed=first + lab.seeds - 1)  # raises if it is too large
    for seed in tqdm(range(first, first + lab.seeds), "seeds", disable=hide_bar, leave=False):
        data = lab.reviews
        if seed != first:
            data = build_data(replace(lab.settings, seed=seed, disable_tqdm=True), lab.world)
        for name, varied in variants.items():
            results[name].append(train(replace(varied, seed=seed), data, lab.world))
            gc.collect()
    lab.page.numbers["accuracies"] = {name: [accuracy for accuracy, _ in several] for name, several in results.items()}
    return results


def train(settings: Settings, data: ReviewData, world: World) -> tuple[float, list[float]]:
    """Train as `app.ddp_loop` does, for the `max_steps` of the settings. Collective."""
    classifier = build_model(settings, data, world)
    bench = distribute(settings, data, classifier.model, world=world)
    steps, rate = bench.data.plan.total_steps, settings.learning_rate or default_learning_rate(classifier.pretrained)
    own = torch.stack(bench.train_steps(bench.micro_batches(), bench.optimization(steps, rate), steps=steps)).mean(
        dim=1
    )
    losses = np.mean(all_gather_object(own.tolist(), world), axis=0).tolist()
    scores, _ = evaluate(classifier.model, data.eval_set("test", settings, world), settings, world=world)
    return scores.accuracy, losses


def accuracies(trained: Mapping[str, Results]) -> pd.DataFrame:
    """Return the mean accuracy of each variant, and its difference from the first one in points, with its interval."""
    by_seed = pd.DataFrame({name: [accuracy for accuracy, _ in results] for name, results in trained.items()})
    baseline = by_seed.iloc[:, 0]
    differences = {}
    for name, values in by_seed.items():
        shown = f"{100 * (values - baseline).mean():+z.2f}"
        # If the difference is the same for all seeds, its variance cannot be estimated.
        if np.ptp(values - baseline) > 1e-12:
            low, high = ttest_rel(values, baseline).confidence_interval()
            shown += f" [{100 * low:+z.2f}, {100 * high:+z.2f}]"
        differences[name] = "" if name == by_seed.columns[0] else shown
    return pd.DataFrame({"accuracy": by_seed.mean().map("{:.2%}".format), "difference, points": pd.Series(differences)})
