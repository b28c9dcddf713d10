"""Measure why tutorials disagree: apply each silent difference between typical scripts to this training, one at a time.

Every variant is trained on the batches, initial weights and dropout masks of app.ddp_loop. The ranks are simulated in
one process: each has its own rows and its own random stream, and their gradients add up to the mean that DDP would
compute. A variant changes nothing else, so any difference from the baseline is its effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm
from transformers import PreTrainedModel, get_scheduler

from ..common.progress import hides_progress
from ..data.csv_table import ReviewTable
from ..data.loaders import Collator, build_train_sampler, loader_options
from ..data.sampler import BatchPlan
from ..data.split import Indices, Split, split_reviews
from ..distributed.process_group import join
from ..distributed.world import World
from ..model.hub import resolve_commit
from ..model.load import load_classifier
from ..model.precision import mixed_precision
from ..settings import Settings
from ..strategies.ddp import DDP
from ..training.build import ReviewData, build_data
from ..training.console import quiet_libraries
from ..training.dropout import seed_micro_batch
from ..training.optim import build_optimizer, build_scheduler, default_learning_rate
from .ablation_table import Outcome, measure_effect
from .ablation_variants import Variant, build_variants, plan_variant


def ablate(settings: Settings, ranks: int, seeds: int) -> dict[str, Any]:
    """Measure the effect of each variant on the step losses and on the accuracy, over seeds.

    Args:
        settings: the settings of the baseline; `seed` is the first seed.
        ranks: number of simulated ranks.
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
            baseline = train_variant(seeded, Variant(), data, ranks, world)
            progress.update()
            for name, variant in variants.items():
                outcome = baseline
                if replace(variant, counted_ranks=1) != Variant():  # counting rows differently needs no training
                    same_split = variant.split == Variant().split
                    variant_data = data if same_split else build_variant_data(seeded, variant, world)
                    outcome = train_variant(seeded, variant, variant_data, ranks, world)
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
    table: ReviewTable, test_size: float, validation_size: float, seed: int, columns: tuple[str, str]
) -> Split:
    """Split like `split_reviews`, but select the rows with `datasets` and without stratifying."""
    split = split_reviews(table, test_size, validation_size, seed, columns)
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


def train_variant(settings: Settings, variant: Variant, data: ReviewData, ranks: int, world: World) -> Outcome:
    """Train one variant, and return its losses and which test rows it classifies correctly."""
    plan = plan_variant(settings, variant, len(data.split.train), ranks)
    classifier = load_classifier(settings, data.table.class_names, data.tokenizer)
    model = classifier.model.to(device=world.device)  # type: ignore[call-arg]
    learning_rate = settings.learning_rate or default_learning_rate(classifier.pretrained)
    optimizer, scheduler = build_optimization(model, settings, variant, plan, learning_rate, world)
    autocast = partial(mixed_precision, settings.precision, world.device)
    simulated_ranks = list(simulate_ranks(settings, variant, data, plan, world))

    losses: list[float] = []
    for step in range(plan.total_steps):
        model.train()
        loss = torch.zeros((), device=world.device)
        for rank in simulated_ranks:
            for batch in rank.micro_batches(step):
                with autocast():
                    share = model(**batch).loss / (plan.ranks * plan.accumulation_steps) * variant.inflation
                share.backward()
                loss += share.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm or float("inf"))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return Outcome(losses, predict_correct(settings, model, data, world))


def predict_correct(settings: Settings, model: PreTrainedModel, data: ReviewData, world: World) -> NDArray[np.bool_]:
    """Return which test rows the model classifies correctly, bool (n_test,) in file order."""
    model.eval()
    eval_set = data.eval_set("test", settings, world)
    correct = np.empty(len(eval_set), dtype=bool)
    positions = iter(eval_set.positions)
    with torch.no_grad(), mixed_precision(settings.precision, world.device):
        for batch in eval_set.loader:
            labels = batch.pop("labels").numpy()
            logits = model(**{name: tensor.to(world.device) for name, tensor in batch.items()}).logits
            correct[list(islice(positions, len(labels)))] = logits.argmax(dim=1).cpu().numpy() == labels
    return correct


def build_optimization(
    model: torch.nn.Module,
    settings: Settings,
    variant: Variant,
    plan: BatchPlan,
    learning_rate: float,
    world: World,
) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Return the optimizer and the schedule of a variant."""
    if variant.optimizer == "AdamW":
        adamw = build_optimizer(model, settings, learning_rate, DDP(settings, plan, world))
        return adamw, build_scheduler(adamw, settings, plan.total_steps)
    betas = (settings.adam_beta1, settings.adam_beta2)
    # With the kernel that torch selects, as in a typical script; a fused kernel only rounds differently.
    adam = torch.optim.Adam(model.parameters(), lr=learning_rate, betas=betas, eps=settings.adam_epsilon)
    return adam, get_scheduler("constant", adam)


class SimulatedRank:
    """The rows and the dropout seeds of one rank, as app.ddp_loop would give them to a process."""

    def __init__(self, rank: int, loader: Any, seed: int, plan: BatchPlan, device: torch.device) -> None:
        self.rank, self.loader, self.seed, self.plan, self.device = rank, loader, seed, plan, device

    def micro_batches(self, step: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the rank's micro-batches of a step, which is counted from 0, after seeding dropout for each."""
        if step % self.plan.steps_per_epoch == 0:
            self.loader.sampler.set_epoch(step // self.plan.steps_per_epoch)
            self.batches = iter(self.loader)
        for number, batch in enumerate(islice(self.batches, self.plan.accumulation_steps)):
            seed_micro_batch(self.seed, step, self.rank, number)
            yield {name: tensor.to(self.device) for name, tensor in batch.items()}


def simulate_ranks(
    settings: Settings, variant: Variant, data: ReviewData, plan: BatchPlan, world: World
) -> Iterator[SimulatedRank]:
    """Yield the simulated ranks in order."""
    train = data.split.train
    collator = Collator(data.tokenizer)
    if variant.padding == "max_length":
        collator = Collator(data.tokenizer, padding="max_length", max_length=settings.max_length)
    for rank in range(plan.ranks):
        sampler = build_train_sampler(data.lengths[train], plan, [rank], settings)
        loader: DataLoader[Any] = DataLoader(
            data.train_rows, plan.micro_size, sampler=sampler, **loader_options(collator, world.device)
        )
        yield SimulatedRank(rank, loader, settings.seed + variant.dropout_seed, plan, world.device)
