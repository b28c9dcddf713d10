"""The sections of the laboratory on training steps: where their time goes, and what settings of DDP change.

All of them time `app.ddp_loop.train_step`, on `tiny-bert` and on a BERT of 4 layers x 312, or on the model that
`--model` names. They follow section 5 of Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data
Parallel Training".
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure as Canvas
from tqdm import tqdm

from ...common.charts import draw_bars, render_svg
from ...common.terminal import hides_progress
from ...data.sampler import plan_batches
from ...distributed.collectives import all_gather_object, raise_on_all_ranks
from ...distributed.world import Topology, World
from ...profiling.breakdown import CATEGORIES, EXPOSED, divide_steps
from ...profiling.profiler import FIRST, events_of, start_profiler
from ...settings import Settings
from ...training.build import ReviewData
from ..page import Figure, Part, Section, Table
from ..steps import TOTAL_STEPS, Bench, build_named, distribute, endless, plain_ddp, timed
from .comparison import comparison_section
from .step_variants import Comparison, Variant, compare, models, reduction_variants

PROFILED_STEPS = 5
LARGER = "BERT 4 x 512"  # the communication's share over a link depends on the size of the model
ROUNDS = 3  # for the time without the profiler
BUCKET_SIZES = (1, 5, 25, 100)  # MiB
SYNC_EVERY = (1, 2, 4, 8)  # micro-batches

EXPLAINED = "docs/communication.md#a-training-step explains"
ABOUT_BREAKDOWN = (
    f"From a profile of {PROFILED_STEPS} steps, which the profiler slows down: the last line of the table is without "
    "it. docs/communication.md#where-the-time-of-a-step-goes---profile defines the parts."
)
# The title and the paragraphs.
ABOUT = {
    "buckets": ("Bucket size", [f"{EXPLAINED} the buckets, and why 25 MiB differs from the default."]),
    "no_sync": ("Skipped synchronization", [f"{EXPLAINED} why not all of the difference is communication."]),
    "unused_parameters": ("Searching for unused parameters", [f"{EXPLAINED} why the difference is pure overhead."]),
    "reduction": ("Plain all-reduce and fixed tree", ["docs/same_bits.md#the-tree describes the fixed tree."]),
}


def measure_step(
    name: str, settings: Settings, data: ReviewData, *, seconds: float, world: World, over_link: bool = False
) -> Section:
    """Measure one of `STEP_SECTIONS`. Each variant of a step is timed for about `seconds`. Collective.

    Args:
        over_link: whether the ranks are connected by an emulated link: the breakdown then shows a larger model as well.
    """
    if name == "breakdown":
        names = models(settings.model)
        return measure_breakdown(settings, data, world, names=[*names, LARGER] if over_link and names[1:] else names)
    with raise_on_all_ranks(world):
        variants = variants_of(name, settings, len(data.split.train), topology=world.topology)
    if name == "no_sync":
        return measure_no_sync(variants, data, seconds, world=world)
    comparisons = [compare(model, variants, data, seconds=seconds, world=world) for model in models(settings.model)]
    return comparison_section(name, ABOUT[name], comparisons, unit="step", draw=world.is_main_process)


def variants_of(name: str, settings: Settings, n_train: int, *, topology: Topology) -> dict[str, Variant]:
    """Return the variants that a section compares.

    Raises:
        UserError: the batch cannot be divided for one of them.
    """
    plain, ranks = plain_ddp(settings), topology.ranks
    match name:
        case "breakdown":
            variants = {"": Variant(settings)}
        case "buckets":
            sizes = {"default": None} | {f"{size} MiB": size for size in BUCKET_SIZES}
            variants = vary(plain, "ddp_bucket_cap_mb", sizes)
        case "no_sync":
            plan = plan_batches(plain, n_train, ranks)
            rows = plan.global_size // plan.accumulation_steps  # of one micro-batch on all ranks
            variants = no_sync_variants(plain, rows, n_train)
        case "unused_parameters":
            variants = vary(plain, "ddp_find_unused_parameters", {"off": False, "on": True})
        case "reduction":
            variants = reduction_variants(plain, topology)
        case _:
            raise ValueError(f"no section is called {name}")
    for variant in variants.values():
        plan_batches(variant.settings, n_train, ranks)
    return variants


def vary(settings: Settings, field: str, values: Mapping[str, Any]) -> dict[str, Variant]:
    """Return steps that differ in one setting, whose value each name has."""
    return {name: Variant(replace(settings, **{field: value})) for name, value in values.items()}


def no_sync_variants(settings: Settings, rows: int, n_train: int) -> dict[str, Variant]:
    """Return steps of several micro-batches of `rows` on all ranks, as far as there are enough training rows."""
    settings = replace(settings, per_device_train_batch_size=None)
    return {
        f"every {k}" if k > 1 else "every one": Variant(
            replace(settings, train_batch_size=k * rows, gradient_accumulation_steps=k)
        )
        for k in SYNC_EVERY
        if k * rows <= n_train
    }


def measure_no_sync(variants: Mapping[str, Variant], data: ReviewData, seconds: float, *, world: World) -> Section:
    """Time micro-batches of which only every k-th exchanges gradients. Collective."""
    comparisons = []
    for model in models(next(iter(variants.values())).settings.model):
        compared = compare(model, variants, data, seconds=seconds, world=world, micro_batches=max(SYNC_EVERY))
        per_micro_batch = {
            name: [seconds / variants[name].settings.gradient_accumulation_steps for seconds in rounds]
            for name, rounds in compared.seconds.items()
        }
        comparisons.append(Comparison(model, per_micro_batch))
    return comparison_section("no_sync", ABOUT["no_sync"], comparisons, unit="micro-batch", draw=world.is_main_process)


# ---- the breakdown ---------------------------------------------------------------------------------------------------


def measure_breakdown(settings: Settings, data: ReviewData, world: World, *, names: Sequence[str]) -> Section:
    by_model: dict[str, pd.Series[float]] = {}
    unprofiled = {}
    hide_bar = hides_progress(settings.disable_tqdm, world.is_main_process)
    for model in tqdm(names, "profiling", leave=False, disable=hide_bar):
        bench = distribute(settings, data, build_named(model, settings, data, world=world), world=world)
        train = partial(bench.train_steps, optimization=bench.optimization(TOTAL_STEPS))
        by_model[model] = pd.DataFrame([steps.mean() for steps in profile_steps(train, bench)]).mean()
        unprofiled[model] = time_unprofiled(train, bench)
    title = f"Where the time of a step goes: {settings.strategy}"
    parts: list[Part] = []
    if world.is_main_process:
        parts.append(Figure(title, breakdown_chart(by_model, title), "The mean of all ranks."))
    parts.append(breakdown_table(by_model, unprofiled))
    content = {
        model: {
            "milliseconds": step[list(CATEGORIES)].to_dict(),
            "communication": step["communication"],
            "unprofiled": 1000 * unprofiled[model],
        }
        for model, step in by_model.items()
    }
    return Section("breakdown", title, [ABOUT_BREAKDOWN], parts, {"strategy": settings.strategy, "models": content})


def profile_steps(train: Callable[..., object], bench: Bench) -> list[pd.DataFrame]:
    """Return the times of some training steps on each rank. `train(micro_batches, steps=n)` trains. Collective."""
    batches = endless(bench.loader)
    profiler = start_profiler(PROFILED_STEPS, bench.world.device)
    last = FIRST + PROFILED_STEPS - 1
    for step in range(1, last + 1):
        train(batches, steps=1)
        if step < last:
            profiler.step()
    profiler.stop()
    return all_gather_object(divide_steps(events_of(profiler)), bench.world)


def time_unprofiled(train: Callable[..., object], bench: Bench) -> float:
    """Return the seconds that one of the same steps takes without the profiler. Collective."""
    times = []
    for _ in range(ROUNDS):
        batches = endless(bench.loader)
        train(batches, steps=FIRST - 1)
        times.append(timed(partial(train, batches, steps=PROFILED_STEPS), bench.world))
    return statistics.median(times) / PROFILED_STEPS


def breakdown_chart(steps: Mapping[str, pd.Series[float]], label: str) -> Markup:
    """Draw the step of each model as a bar, divided into its parts."""

    def draw(canvas: Canvas) -> None:
        axes = canvas.add_subplot(xlabel="share of the step, %", xlim=(0, 100))
        parts = {name: [100 * step[name] / step["step"] for step in steps.values()] for name in CATEGORIES}
        draw_bars(axes, list(steps), parts)
        canvas.legend(loc="outside lower center", ncols=3)

    return render_svg(150 + 50 * len(steps), label, draw)


def breakdown_table(by_model: Mapping[str, pd.Series[float]], unprofiled: Mapping[str, float]) -> Table:
    """Return a table with one line per part of the step and two columns per model."""

    rows = []
    for name in (*CATEGORIES, "step", "communication"):
        rows.append([name])
        for step in by_model.values():
            rows[-1] += [f"{step[name]:.2f}", f"{step[name] / step['step']:.1%}"]
    hidden, plain = ["of which hidden"], ["step without the profiler"]
    for model, step in by_model.items():
        communication = step["communication"]
        behind = communication - step[EXPOSED]
        hidden += [f"{behind:.2f}", f"{behind / communication:.0%}" if communication else "–"]
        plain += [f"{1000 * unprofiled[model]:.2f}", ""]
    header = [""] + [cell for model in by_model for cell in (f"{model}, ms", "share")]
    return Table("Parts of a step", header, [*rows, hidden, plain])
