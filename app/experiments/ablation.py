"""Measure why tutorials disagree: apply each silent difference between typical scripts to this training, one at a time.

Every variant is trained by the training step of app.ddp_loop, with its batches, initial weights and dropout masks. One
process works for all ranks, as with --logical_ranks. A variant changes nothing else, so any difference from the
baseline is its effect.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from typing import Any

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DistributedSampler
from tqdm import tqdm
from transformers import get_scheduler

from ..bench.harness import Bench, distribute
from ..common.progress import hides_progress
from ..data.csv_table import ReviewTable
from ..data.loaders import Collator
from ..data.split import Indices, Split, split_reviews
from ..ddp_loop import evaluate
from ..distributed.process_group import join
from ..distributed.world import World
from ..model.hub import resolve_commit
from ..record.steps import mean
from ..settings import Settings
from ..strategies.ddp import DDP
from ..training.build import ReviewData, build_data, build_model
from ..training.console import quiet_libraries
from ..training.optim import build_optimizer, build_scheduler, default_learning_rate
from .ablation_table import Outcome, measure_effect
from .ablation_variants import Variant, build_variants, variant_settings


def ablate(settings: Settings, ranks: int, seeds: int) -> dict[str, Any]:
    """Measure the effect of each variant on the step losses and on the accuracy, over seeds.

    Args:
        settings: the settings of the baseline; `seed` is the first seed.
        ranks: number of simulated ranks, a power of two.
        seeds: number of seeds.

    Returns:
        The content of ablation.json.

    Raises:
        UserError: a mistake in the file, the split, the batch or the model.
    """
    settings = replace(settings, revision=resolve_commit(settings))  # every training starts from the same commit
    variants = build_variants(ranks, settings.gradient_accumulation_steps)
    pairs: dict[str, list[tuple[Outcome, Outcome]]] = {name: [] for name in variants}
    with join(settings) as world:
        quiet_libraries(world)
        progress = tqdm(
            total=seeds * (len(variants) + 1), unit=" trainings", disable=hides_progress(settings.disable_tqdm)
        )
        for seed in range(settings.seed, settings.seed + seeds):
            seeded = replace(settings, seed=seed)
            data = build_variant_data(seeded, Variant(), world)
            baseline = train_variant(seeded, Variant(), data, ranks=ranks, world=world)
            progress.update()
            for name, variant in variants.items():
                outcome = baseline
                if replace(variant, counted_ranks=1) != Variant():  # counting rows differently needs no training
                    same_split = variant.split == Variant().split
                    variant_data = data if same_split else build_variant_data(seeded, variant, world)
                    outcome = train_variant(seeded, variant, variant_data, ranks=ranks, world=world)
                gc.collect()  # DDP's modules are part of reference cycles, and each holds a complete model
                counted = repeat_padded_rows(outcome.correct, variant.counted_ranks)
                pairs[name].append((baseline, replace(outcome, correct=counted)))
                progress.update()
        progress.close()
    return {
        "settings": settings.as_dict() | {"csv": str(settings.csv_path)},
        "ranks": ranks,
        "seeds": list(range(settings.seed, settings.seed + seeds)),
        "n_test": len(baseline.correct),
        "baseline": {"accuracies": [float(a.correct.mean()) for a, _ in next(iter(pairs.values()))]},
        "differences": [{"name": name} | measure_effect(pairs[name], variants[name]) for name in variants],
    }


# ---- data ------------------------------------------------------------------------------------------------------------


def build_variant_data(settings: Settings, variant: Variant, world: World) -> ReviewData:
    """Build the data as the training paths do, except for the variant's split function."""
    by_datasets = variant.split == "datasets, not stratified"
    return build_data(
        replace(settings, disable_tqdm=True), world, split_with_datasets if by_datasets else split_reviews
    )


def split_with_datasets(
    table: ReviewTable, *, test_size: float, validation_size: float, seed: int, columns: tuple[str, str]
) -> Split:
    """Split like `split_reviews`, but select the rows with `datasets` and without stratifying."""
    split = split_reviews(table, test_size=test_size, validation_size=validation_size, seed=seed, columns=columns)
    train, test = _select_with_datasets(np.arange(len(table), dtype=np.int64), test_size, seed)
    validation = split.validation
    if validation_size:
        train, validation = _select_with_datasets(train, validation_size, seed)
    return replace(split, train=train, validation=validation, test=test)


def _select_with_datasets(rows: Indices, test_size: float, seed: int) -> tuple[Indices, Indices]:
    """Return the training and the test rows that `datasets` selects, each sorted."""
    parts = datasets.Dataset.from_dict({"row": rows}).train_test_split(test_size=test_size, seed=seed)
    train, test = (np.sort(np.asarray(parts[name]["row"], dtype=np.int64)) for name in ("train", "test"))
    return train, test


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
    bench = distribute(settings, data, classifier.model, world=world, make_strategy=DDP)
    if variant.padding == "max_length":
        bench.loader.collate_fn = Collator(data.tokenizer, padding="max_length", max_length=settings.max_length)
    learning_rate = settings.learning_rate or default_learning_rate(classifier.pretrained)
    optimizer, scheduler = build_optimization(bench, variant, learning_rate)
    # A training step uses the seed for dropout only.
    reseeded = replace(bench, settings=replace(settings, seed=settings.seed + variant.dropout_seed))
    losses = reseeded.train_without_record(optimizer, scheduler)
    test_set = data.eval_set("test", settings, world)
    _, logits = evaluate(classifier.model, test_set, settings, world=world)
    return Outcome([mean(step.tolist()) for step in losses], logits.argmax(axis=1) == test_set.labels)


def inflate_loss(model: torch.nn.Module, inputs: Any, output: Any, *, factor: int) -> None:
    """Multiply the loss that a model returns, as a forward hook. Without labels, it returns none."""
    if output.loss is not None:
        output.loss = output.loss * factor


def build_optimization(
    bench: Bench, variant: Variant, learning_rate: float
) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Return the optimizer and the schedule of a variant."""
    settings = bench.settings
    if variant.optimizer == "AdamW":
        adamw = build_optimizer(bench.wrapped, settings, learning_rate, strategy=bench.strategy)
        return adamw, build_scheduler(adamw, settings, bench.data.plan.total_steps)
    betas = (settings.adam_beta1, settings.adam_beta2)
    # With the fused kernel: the check for non-finite gradients in train_step requires it.
    adam = torch.optim.Adam(
        bench.wrapped.parameters(), lr=learning_rate, betas=betas, eps=settings.adam_epsilon, fused=True
    )
    return adam, get_scheduler("constant", adam)
