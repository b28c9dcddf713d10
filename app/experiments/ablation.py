"""The ablation: why tutorials disagree. It applies each silent difference between typical scripts, one at a time.

A variant is trained by the training step of app.ddp_loop, with its batches, initial weights and dropout masks. One
process simulates all ranks, as with --logical_ranks. A variant differs from the baseline, which is this project's
training, in one thing, so any difference in the results is its effect.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from ..bench.steps import Bench
from ..common.errors import UserError, escape_control_characters
from ..common.files import write_json, write_text
from ..common.formats import markdown_table, percent, points
from ..data.batches import loader_options, plan_batches
from ..ddp_loop import evaluate
from ..distributed.launcher import CPU_PROCESSES, resolve_nproc_per_node
from ..distributed.process_group import join
from ..distributed.world import World
from ..model.hub import resolve_commit
from ..program import select_precision
from ..record.steps import mean
from ..report.statistics import paired
from ..runs.folder import create_folder
from ..runs.schema import RUNS
from ..settings import Settings
from ..strategies.ddp import DDPStrategy
from ..strategies.optimization import mean_loss
from ..training.build import ReviewData, build_data, build_model, read_and_split
from ..training.console import quiet_libraries
from .variants import BASELINE, Variant, build_variants, count_rows, rows_of_steps, variant_settings

# For each effect: its heading in the table, how its values over the seeds are combined, and their format.
EFFECTS = {
    "first_differing_step": ("first differing step", "min", "{:.0f}"),
    "mean_loss_difference": (r"loss, mean \|Δ\|", "mean", "{:.4f}"),
    "max_loss_difference": (r"loss, max \|Δ\|", "max", "{:.4f}"),
    "final_weight_difference": ("weights, relative Δ at the end", "max", "{:.1e}"),
    "accuracy": ("accuracy", "mean", "{:.2%}"),
    "changed_rows": ("rows that became correct or incorrect", "mean", "{:.1f}"),
    "counted_rows": ("rows counted", "max", "{:.0f}"),
    "trained_test_rows": ("test rows trained on", "mean", "{:.1%}"),
}


@dataclass(frozen=True)
class Outcome:
    """The result of one training."""

    losses: list[float]  # of each step, as the script would log it
    correct: NDArray[np.bool_]  # (n_test,), whether each test row was classified correctly, in file order
    weights: torch.Tensor  # flattened
    trained_test_rows: float = 0.0  # the share of the test rows on which the model was trained


def run_ablation(settings: Settings, nproc_per_node: str, seeds: int) -> int:
    """Train every variant with each seed, from that of the settings on, and write the table; return the exit status."""
    settings = select_precision(settings)
    if settings.precision == "fp16" or settings.logical_ranks or settings.ddp_comm_hook != "no":
        raise UserError("--ablate simulates plain ranks in fp32 or bf16: leave out --logical_ranks, hooks and fp16")
    on_cpu = replace(settings, use_cpu=True)  # one process simulates the ranks, whatever GPUs there are
    ranks = CPU_PROCESSES if nproc_per_node == "auto" else resolve_nproc_per_node(nproc_per_node, on_cpu)
    if ranks.bit_count() != 1:
        raise UserError(f"--nproc_per_node {ranks}: must be a power of two, because --ablate simulates logical ranks")
    _, split, _ = read_and_split(settings, ranks)  # reports a mistake before there is a folder
    variants = build_variants(ranks, settings.gradient_accumulation_steps)
    folder = create_folder(settings.output_dir, RUNS / "ablations")
    settings = replace(settings, revision=resolve_commit(settings))  # every training starts from the same commit
    found: list[dict[str, Any]] = []
    with join(settings) as world:
        quiet_libraries(world)
        for seed in range(settings.seed, settings.seed + seeds):
            found += train_variants(replace(settings, seed=seed), variants, ranks, world=world)
    runs = pd.DataFrame(found)
    effects = summarize(runs)
    content = {"settings": settings.as_dict() | {"csv": str(settings.csv_path)}, "ranks": ranks}
    content |= {"n_test": len(split.test), "runs": records(runs), "differences": records(effects)}
    about = f"{len(split.test)} test rows, {ranks} rank(s), {seeds} seed(s), the first one {settings.seed}"
    markdown = f"{about}. Each row of the table changes one thing in the baseline.\n\n{as_markdown(effects)}"
    write_json(folder / "ablation.json", content)
    write_text(folder / "ablation.md", markdown)
    print(f"\n{markdown}")
    print(f"written to {escape_control_characters(str(folder))}/: ablation.md, ablation.json")
    return 0


def train_variants(
    settings: Settings, variants: dict[str, Variant], ranks: int, *, world: World
) -> Iterator[dict[str, Any]]:
    """Train the baseline and the variants with one seed, and yield the effect of each change."""
    data = build_data(replace(settings, disable_tqdm=True), world)
    train = partial(train_variant, settings, data=data, ranks=ranks, world=world)
    expected = train(BASELINE)
    for name, variant in variants.items():
        trained = replace(variant, counted="once")  # counting rows differently needs no training
        changed = expected if trained == BASELINE else train(trained)
        print(f"seed {settings.seed}: {name}", flush=True)
        yield {"change": name, "seed": settings.seed} | compare(expected, changed, variant, ranks=ranks)


def compare(baseline: Outcome, changed: Outcome, variant: Variant, *, ranks: int) -> dict[str, float]:
    """Return the effect of a variant with one seed; NaN if it is not defined.

    The accuracy is computed as in typical scripts: the number of correct predictions, in which some rows may count
    twice or not at all, divided by the number of test rows.
    """
    gaps = np.abs([x - y for x, y in zip(baseline.losses, changed.losses, strict=False)])  # of the common steps
    counted = count_rows(changed.correct, variant, ranks)
    reference = baseline.weights.double()
    return {
        "first_differing_step": float(gaps.nonzero()[0][0] + 1) if gaps.any() else math.nan,
        "mean_loss_difference": float(gaps.mean()),
        "max_loss_difference": float(gaps.max()),
        "final_weight_difference": float((reference - changed.weights).norm() / reference.norm()),
        "baseline_accuracy": float(baseline.correct.mean()),
        "accuracy": float(counted.sum() / len(changed.correct)),
        "changed_rows": int((baseline.correct != changed.correct).sum()),
        "counted_rows": len(counted),
        "trained_test_rows": changed.trained_test_rows,
    }


def summarize(runs: pd.DataFrame) -> pd.DataFrame:
    """Combine the effects of each change over its seeds, with the interval of the difference in accuracy."""
    groups = runs.groupby("change", sort=False)
    effects = groups.agg({"baseline_accuracy": "mean"} | {name: how for name, (_, how, _) in EFFECTS.items()})
    statistics = [paired(group["accuracy"], group["baseline_accuracy"]) for _, group in groups]
    effects["accuracy_difference"] = [found.mean_a - found.mean_b for found in statistics]
    for limit in ("low", "high"):
        effects[limit] = [(found.difference or {}).get(limit, math.nan) for found in statistics]
    return effects.reset_index()


def as_markdown(effects: pd.DataFrame) -> str:
    """Return the accuracy of the baseline, and the table."""
    table = effects[["change"]].copy()
    for name, (heading, _, form) in EFFECTS.items():
        table[heading] = effects[name].map(form.format, na_action="ignore").astype(object).fillna("–")
    limits = zip(effects["low"], effects["high"], strict=True)
    intervals = ["" if math.isnan(low) else f" [{points(low)}, {points(high)}]" for low, high in limits]
    heading = "Δ points [95% confidence interval over seeds]"
    table.insert(6, heading, effects["accuracy_difference"].map(points) + intervals)
    accuracy = percent(effects["baseline_accuracy"].iloc[0], 2)
    lines = markdown_table(list(map(str, table)), table.to_numpy().tolist(), text_columns=len(table.columns))
    return f"Baseline: this project's training, with a test accuracy of {accuracy}.\n\n{lines}"


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows in JSON types, which have no infinity or NaN."""
    finite = frame.replace([math.inf, -math.inf], math.nan).astype(object)
    return [
        {str(name): value for name, value in row.items()}
        for row in finite.where(finite.notna(), None).to_dict("records")
    ]


def train_variant(settings: Settings, variant: Variant, data: ReviewData, *, ranks: int, world: World) -> Outcome:
    """Train one variant, and return its losses, its weights and which test rows it classifies correctly."""
    gc.collect()  # DDP's modules are part of reference cycles, and each holds a complete model
    settings = variant_settings(settings, variant, ranks)
    plan = plan_batches(settings, len(data.split.train), world.size)
    data = replace(data, plan=plan)
    model = build_model(settings, data, world).model
    rows = rows_of_steps(settings, variant, data)
    options = loader_options(data.collator, world.device)
    loader = DataLoader(data.rows, plan.micro_size, sampler=rows.ravel().tolist(), **options)
    # From here on, the seed is used for dropout only.
    settings = replace(settings, seed=settings.seed + variant.dropout_seed)
    data = replace(data, plan=replace(plan, total_steps=len(rows)))
    strategy = DDPStrategy(settings, data.plan, world)
    bench = Bench(settings, world, data, strategy, model, strategy.wrap(model), loader)
    inflated = replace(bench.optimization(len(rows)), loss=lambda *of: variant.inflation * mean_loss(*of))
    losses = [mean(of_step.tolist()) for of_step in bench.train_steps(loader, inflated, steps=len(rows))]
    test_set = data.eval_set("test", settings, world)
    _, logits = evaluate(model, test_set, settings, world=world)
    return Outcome(
        losses,
        logits.argmax(axis=1) == test_set.labels,
        torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()]),
        trained_test_rows=float(np.isin(data.split.test, rows).mean()),
    )
