"""Measure why tutorials disagree: apply each silent difference between typical scripts to this training, one at a time.

Every variant is trained by the training step of app.ddp_loop, with its batches, initial weights and dropout masks. One
process works for all ranks, as with --logical_ranks. A variant changes nothing else, so any difference from the
baseline is its effect.
"""

from __future__ import annotations

import gc
import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler
from tqdm import tqdm

from ..bench.harness import distribute
from ..common.errors import UserError, escape_control_characters
from ..common.files import write_json, write_text
from ..common.formats import render_template
from ..common.terminal import hides_progress
from ..data.csv_table import Indices, ReviewTable
from ..data.loaders import Collator
from ..data.sampler import plan_batches, resolve_train_batch_size
from ..data.split import Split, split_reviews
from ..ddp_loop import evaluate
from ..distributed.environment import check_environment
from ..distributed.process_group import join
from ..distributed.world import World
from ..model.hub import resolve_commit
from ..record.steps import mean
from ..report.statistics import paired_seeds
from ..runs.folder import create_folder
from ..runs.schema import RUNS
from ..settings import Settings
from ..strategies.ddp import DDPStrategy
from ..training.build import ReviewData, build_data, build_model, read_and_split
from ..training.console import quiet_libraries
from ..training.step import default_learning_rate

PADDED_RANKS = 8  # a node of GPUs; the share of repeated rows grows with the number of ranks


@dataclass(frozen=True)
class Variant:
    """How a model is trained. The defaults are this project's; each variant of the ablation changes one of them."""

    split: Literal["scikit-learn, stratified", "datasets, not stratified"] = "scikit-learn, stratified"
    inflation: int = 1  # factor on loss and gradients
    optimizer: Literal["AdamW", "Adam"] = "AdamW"  # with decay and schedule, or with neither
    padding: Literal["longest", "max_length"] = "longest"
    batch_factor: int = 1  # factor on the number of ranks, each with as many rows as before
    counted_ranks: int = 1  # ranks among which `DistributedSampler` divides the test rows, repeating some of them
    dropout_seed: int = 0  # added to the seed of the dropout masks


BASELINE = Variant()


@dataclass(frozen=True)
class Outcome:
    """The result of one training."""

    losses: list[float]  # of each step, as the script would log it
    correct: NDArray[np.bool_]  # (n_test,), whether each test row was classified correctly, in file order


def run_ablation(settings: Settings, ranks: int, seeds: int) -> int:
    """Train every variant, and print and write the table; return the exit status."""
    check_environment()
    _, split, _ = read_and_split(settings, ranks)
    for name, variant in build_variants(ranks, settings.gradient_accumulation_steps).items():
        try:
            plan_batches(variant_settings(settings, variant, ranks), len(split.train), world_size=1)
        except UserError as problem:
            raise UserError(f"{name}: {problem}") from None
    folder = create_folder(settings.output_dir, RUNS / "ablations")
    ablation = ablate(settings, ranks, seeds)
    markdown = render_template("ablation.md.j2", ablation=ablation)
    write_json(folder / "ablation.json", ablation)
    write_text(folder / "ablation.md", markdown)
    print(f"\n{markdown}")
    print(f"written to {escape_control_characters(str(folder))}/: ablation.md, ablation.json")
    return 0


def ablate(settings: Settings, ranks: int, seeds: int) -> dict[str, Any]:
    """Return the content of ablation.json: the effect of each variant on the step losses and on the accuracy.

    The settings are the baseline's, with the first seed. The ranks, a power of two, are simulated.
    """
    settings = replace(settings, revision=resolve_commit(settings))  # every training starts from the same commit
    variants = build_variants(ranks, settings.gradient_accumulation_steps)
    pairs: dict[str, list[tuple[Outcome, Outcome]]] = {name: [] for name in variants}
    total, is_hidden = seeds * (len(variants) + 1), hides_progress(settings.disable_tqdm)
    with join(settings) as world, tqdm(total=total, unit=" trainings", disable=is_hidden) as progress:
        quiet_libraries(world)
        for seed in range(settings.seed, settings.seed + seeds):
            seeded = replace(settings, seed=seed)
            data = build_variant_data(seeded, BASELINE, world)
            baseline = train_variant(seeded, BASELINE, data, ranks=ranks, world=world)
            progress.update()
            for name, variant in variants.items():
                outcome = baseline
                if replace(variant, counted_ranks=1) != BASELINE:  # counting rows differently needs no training
                    same_split = variant.split == BASELINE.split
                    variant_data = data if same_split else build_variant_data(seeded, variant, world)
                    outcome = train_variant(seeded, variant, variant_data, ranks=ranks, world=world)
                gc.collect()  # DDP's modules are part of reference cycles, and each holds a complete model
                counted = repeat_padded_rows(outcome.correct, variant.counted_ranks)
                pairs[name].append((baseline, replace(outcome, correct=counted)))
                progress.update()
    return {
        "settings": settings.as_dict() | {"csv": str(settings.csv_path)},
        "ranks": ranks,
        "seeds": list(range(settings.seed, settings.seed + seeds)),
        "n_test": len(baseline.correct),
        "baseline": {"accuracies": [float(a.correct.mean()) for a, _ in next(iter(pairs.values()))]},
        "differences": [{"name": name} | measure_effect(pairs[name], variants[name]) for name in variants],
    }


def measure_effect(pairs: list[tuple[Outcome, Outcome]], variant: Variant) -> dict[str, Any]:
    """Return an entry of `differences` in ablation.json, from the baseline's and the variant's outcome for each seed.

    The accuracies are computed as in typical scripts: the number of correct predictions, in which some rows may count
    twice, divided by the number of test rows.
    """
    n_test = len(pairs[0][0].correct)
    changed = [float(b.correct.sum() / n_test) for _, b in pairs]
    gaps = [np.abs([x - y for x, y in zip(a.losses, b.losses, strict=False)]) for a, b in pairs]  # of common steps
    mean_gap, max_gap = float(np.mean([gap.mean() for gap in gaps])), float(np.max([gap.max() for gap in gaps]))
    same_rows = variant.split == BASELINE.split and variant.counted_ranks == 1
    statistics = paired_seeds(changed, [float(a.correct.mean()) for a, _ in pairs])
    interval = statistics.difference
    return {
        "recipe": asdict(variant),
        "first_differing_steps": [int(gap.nonzero()[0][0]) + 1 if gap.any() else None for gap in gaps],
        "mean_loss_difference": mean_gap if math.isfinite(mean_gap) else None,
        "max_loss_difference": max_gap if math.isfinite(max_gap) else None,
        "accuracies": changed,
        "accuracy_difference": statistics.mean_a - statistics.mean_b,
        "interval": [interval.low, interval.high] if interval else None,
        "p_value": statistics.p_value,
        "changed_rows": float(np.mean([(a.correct != b.correct).sum() for a, b in pairs])) if same_rows else None,
        "counted_rows": len(pairs[0][1].correct),
    }


# ---- variants --------------------------------------------------------------------------------------------------------


def build_variants(ranks: int, accumulation_steps: int) -> dict[str, Variant]:
    """Return the variants by name. The first one is the control: a change that should have no systematic effect."""
    factor = ranks * accumulation_steps if ranks * accumulation_steps > 1 else 2
    return {
        "only another dropout seed (control)": Variant(dropout_seed=1_000),
        "split by `datasets`, not stratified, instead of scikit-learn": Variant(split="datasets, not stratified"),
        f"test rows padded to {PADDED_RANKS} equal shards by `DistributedSampler`, repeated rows counted": Variant(
            counted_ranks=PADDED_RANKS
        ),
        f"loss and gradients inflated by Trainer, x {factor}": Variant(inflation=factor),
        "Adam without decay or schedule instead of AdamW with both": Variant(optimizer="Adam"),
        "every review padded to the maximum length": Variant(padding="max_length"),
        f"batch size per rank, {2 * ranks} ranks instead of {ranks}": Variant(batch_factor=2),
    }


def variant_settings(settings: Settings, variant: Variant, ranks: int) -> Settings:
    """Return the settings of a variant: one process works for all ranks, of which a variant may have more."""
    if variant.optimizer == "Adam":  # AdamW without decay
        settings = replace(settings, weight_decay=0.0, lr_scheduler_type="constant")
    return replace(
        settings,
        logical_ranks=ranks * variant.batch_factor,
        train_batch_size=resolve_train_batch_size(settings, ranks) * variant.batch_factor,
        per_device_train_batch_size=None,
    )


def build_variant_data(settings: Settings, variant: Variant, world: World) -> ReviewData:
    """Build the data as the training paths do, except for the variant's split function."""
    split_rows = split_reviews if variant.split == BASELINE.split else split_with_datasets
    return build_data(replace(settings, disable_tqdm=True), world, split_rows)


def split_with_datasets(table: ReviewTable, *, test_size: float, validation_size: float, **options: Any) -> Split:
    """Split like `split_reviews`, but select the rows with `datasets` and without stratifying."""
    split = split_reviews(table, test_size=test_size, validation_size=validation_size, **options)

    def divide(rows: Indices, size: float) -> tuple[Indices, Indices]:
        parts = datasets.Dataset.from_dict({"row": rows}).train_test_split(test_size=size, seed=options["seed"])
        rest, selected = (np.sort(np.asarray(parts[name]["row"], dtype=np.int64)) for name in ("train", "test"))
        return rest, selected

    train, test = divide(np.arange(len(table), dtype=np.int64), test_size)
    train, validation = divide(train, validation_size) if validation_size else (train, split.validation)
    return replace(split, train=train, validation=validation, test=test)


def repeat_padded_rows(correct: NDArray[np.bool_], ranks: int) -> NDArray[np.bool_]:
    """Return the rows as `DistributedSampler` distributes them: it repeats the first rows to make the shards equal."""
    if ranks == 1:
        return correct
    n = len(correct)
    shards = [DistributedSampler(range(n), ranks, rank, shuffle=False) for rank in range(ranks)]  # type: ignore[arg-type, var-annotated]
    return np.concatenate([correct[list(shard)] for shard in shards])


# ---- training --------------------------------------------------------------------------------------------------------


def train_variant(settings: Settings, variant: Variant, data: ReviewData, *, ranks: int, world: World) -> Outcome:
    """Train one variant, and return its losses and which test rows it classifies correctly."""
    settings = variant_settings(settings, variant, ranks)
    classifier = build_model(settings, data, world)
    if variant.inflation != 1:
        classifier.model.register_forward_hook(partial(inflate_loss, factor=variant.inflation))
    bench = distribute(settings, data, classifier.model, world=world, make_strategy=DDPStrategy)
    if variant.padding == "max_length":
        bench.loader.collate_fn = Collator(data.tokenizer, padding="max_length", max_length=settings.max_length)
    learning_rate = settings.learning_rate or default_learning_rate(classifier.pretrained)
    # A training step uses the seed for dropout only.
    reseeded = replace(bench, settings=replace(settings, seed=settings.seed + variant.dropout_seed))
    losses = reseeded.train_without_record(learning_rate)
    test_set = data.eval_set("test", settings, world)
    _, logits = evaluate(classifier.model, test_set, settings, world=world)
    return Outcome([mean(step.tolist()) for step in losses], logits.argmax(axis=1) == test_set.labels)


def inflate_loss(model: torch.nn.Module, inputs: Any, output: Any, *, factor: int) -> None:
    """Multiply the loss that a model returns, as a forward hook. Without labels, it returns none."""
    if output.loss is not None:
        output.loss = output.loss * factor
