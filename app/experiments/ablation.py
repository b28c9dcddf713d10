"""Why tutorials disagree: each silent difference of the usual pair of scripts, put into our recipe alone.

Every difference is trained for real, on the batches, weights and dropout masks of app.ddp_loop. The ranks take turns in
one process: each has its rows and its random stream, and their gradients add up to the mean that DDP would make. Only
what a difference changes is other than in the run it is compared with, so what the two differ in is its doing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DistributedSampler
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, get_scheduler, set_seed

from app.data.csv_table import ReviewTable
from app.data.loaders import Collator, build_eval_set, build_train_loader
from app.data.sampler import BatchPlan, plan_batches
from app.data.split import Indices, Split
from app.data.tokenize import lengths_of, tokenize
from app.distributed.process_group import join
from app.distributed.world import World
from app.errors import UserError
from app.model.hub import resolve_commit
from app.model.load import load_classifier, load_tokenizer
from app.report.formats import markdown_environment
from app.report.statistics import Interval, paired_seeds
from app.settings import Settings
from app.strategies.ddp import DDP
from app.training.build import read_and_split
from app.training.console import quiet_libraries
from app.training.optim import build_optimizer, build_scheduler, default_learning_rate

PADDED_RANKS = 8  # a node of GPUs; the share of repeated rows grows with the ranks


@dataclass(frozen=True)
class Variant:
    """What is ours unless a difference says otherwise."""

    split: Literal["scikit-learn, stratified", "datasets, not stratified"] = "scikit-learn, stratified"
    inflation: int = 1
    optimizer: Literal["AdamW", "Adam"] = "AdamW"
    padding: Literal["longest", "max_length"] = "longest"
    batch_factor: int = 1
    counted_ranks: int = 1
    dropout_seed: int = 0


@dataclass(frozen=True)
class Reviews:
    """The rows of one split, tokenised by a tokenizer that has seen its training rows alone."""

    table: ReviewTable
    split: Split
    tokenizer: PreTrainedTokenizerBase
    rows: datasets.Dataset
    lengths: NDArray[np.int64]


@dataclass(frozen=True)
class Outcome:
    """`losses` has the loss of each step as the script would log it, `correct` is bool (n_test,) in file order."""

    losses: list[float]
    correct: NDArray[np.bool_]


def differences(ranks: int, accumulation_steps: int) -> dict[str, Variant]:
    """Each silent difference by its name, and for a yardstick one that is none."""
    factor = ranks * accumulation_steps if ranks * accumulation_steps > 1 else 2
    return {
        "nothing but another dropout seed (the yardstick)": Variant(dropout_seed=1_000),
        "another split function: `datasets`' instead of scikit-learn's stratified one": Variant(
            split="datasets, not stratified"
        ),
        f"test rows padded to {PADDED_RANKS} equal shares by `DistributedSampler`, hits counted twice": Variant(
            counted_ranks=PADDED_RANKS
        ),
        f"loss and gradients inflated by Trainer, x {factor}": Variant(inflation=factor),
        "Adam without decay or schedule instead of AdamW with both": Variant(optimizer="Adam"),
        "every review padded to the maximum": Variant(padding="max_length"),
        f"a batch per rank, at {2 * ranks} ranks instead of {ranks}": Variant(batch_factor=2),
    }


def check_batches(settings: Settings, n_train: int, ranks: int) -> None:
    """Check that every difference can be trained, before any of them is.

    Raises:
        UserError: names the difference that can't.
    """
    for name, recipe in differences(ranks, settings.gradient_accumulation_steps).items():
        try:
            scaled_plan(settings, recipe, n_train, ranks)
        except UserError as problem:
            raise UserError(f"{name}: {problem}") from None


# ---- the experiment -------------------------------------------------------------------------------------------------


def ablate(settings: Settings, ranks: int, seeds: int) -> dict[str, Any]:
    """The content of ablation.json: what each difference does to step losses and accuracy, over seeds.

    Raises:
        UserError: anything wrong with the file, the split, the batch or the model.
    """
    settings = replace(settings, revision=resolve_commit(settings))  # every training starts from the same commit
    recipes = differences(ranks, settings.gradient_accumulation_steps)
    found: dict[str, list[tuple[Outcome, Outcome]]] = {name: [] for name in recipes}
    with join(settings) as world:
        quiet_libraries(world)
        bar = tqdm(total=seeds * (len(recipes) + 1), unit=" trainings", disable=settings.disable_tqdm)
        for seed in range(settings.seed, settings.seed + seeds):
            mine = replace(settings, seed=seed)
            ours = read(mine, Variant(), ranks, world)
            usual, baseline = train(mine, Variant(), ours, ranks, world), Variant()
            bar.update()
            for name, recipe in recipes.items():
                reviews = ours if recipe.split == baseline.split else read(mine, recipe, ranks, world)
                retrained = replace(recipe, counted_ranks=1) != baseline
                outcome = train(mine, recipe, reviews, ranks, world) if retrained else usual
                found[name].append((usual, replace(outcome, correct=counted(outcome.correct, recipe.counted_ranks))))
                bar.update()
        bar.close()
    return {
        "settings": settings.as_dict() | {"csv": str(settings.csv_path)},
        "ranks": ranks,
        "seeds": list(range(settings.seed, settings.seed + seeds)),
        "n_test": len(usual.correct),
        "baseline": {"accuracies": [float(a.correct.mean()) for a, _ in next(iter(found.values()))]},
        "differences": [{"name": name} | effect(pairs, recipes[name]) for name, pairs in found.items()],
    }


def read(settings: Settings, recipe: Variant, ranks: int, world: World) -> Reviews:
    """Rows, split and tokens, as app.preparation makes them."""
    table, split, _ = read_and_split(settings, ranks)
    if recipe.split == "datasets, not stratified":
        train, test = _set_apart(np.arange(len(table), dtype=np.int64), settings.test_size, settings.seed)
        validation = split.validation
        if settings.validation_size:
            train, validation = _set_apart(train, settings.validation_size, settings.seed)
        split = replace(split, train=train, validation=validation, test=test)
    tokenizer = load_tokenizer(settings, table.texts.iloc[split.train])
    tokens = tokenize(table, tokenizer, settings.max_length, Path(settings.cache_dir), world, disable_tqdm=True)
    return Reviews(table, split, tokenizer, tokens.remove_columns("length"), lengths_of(tokens))


def _set_apart(rows: Indices, share: float, seed: int) -> tuple[Indices, Indices]:
    """The rows that `datasets` keeps and those that it sets apart, each sorted."""
    parts = datasets.Dataset.from_dict({"row": rows}).train_test_split(test_size=share, seed=seed)
    kept, apart = (np.sort(np.asarray(parts[name]["row"], dtype=np.int64)) for name in ("train", "test"))
    return kept, apart


def scaled_plan(settings: Settings, recipe: Variant, n_train: int, ranks: int) -> BatchPlan:
    """The batches of a recipe, which may have more ranks with as many rows each.

    Raises:
        UserError: fewer training rows than one batch.
    """
    settings = replace(settings, train_batch_size=settings.train_batch_size * recipe.batch_factor)
    return plan_batches(settings, n_train, ranks * recipe.batch_factor)


def train(settings: Settings, recipe: Variant, reviews: Reviews, ranks: int, world: World) -> Outcome:
    """One training, and its test rows."""
    plan = scaled_plan(settings, recipe, len(reviews.split.train), ranks)
    classifier = load_classifier(settings, reviews.table.class_names, reviews.tokenizer)
    model = classifier.model.to(device=world.device)  # type: ignore[call-arg]
    rate = settings.learning_rate or default_learning_rate(classifier.pretrained)
    optimizer, scheduler = optimization(model, settings, recipe, plan, rate, world)
    autocast = partial(torch.autocast, world.device.type, dtype=torch.bfloat16, enabled=settings.bf16)
    turns = list(simulate_ranks(settings, recipe, reviews, plan, world))

    losses: list[float] = []
    for step in range(plan.total_steps):
        model.train()
        loss = torch.zeros((), device=world.device)
        for rank in turns:
            for batch in rank.batches(step):
                with autocast():
                    share = model(**batch).loss / (plan.ranks * plan.accumulation_steps) * recipe.inflation
                share.backward()
                loss += share.detach()
            rank.leave()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm or float("inf"))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss))

    model.eval()
    test = reviews.split.test
    collator = Collator(reviews.tokenizer)
    labels = reviews.table.labels[test]
    eval_set = build_eval_set(
        "test", reviews.rows.select(test), reviews.lengths[test], labels, collator, world, settings
    )
    correct = np.empty(len(test), dtype=bool)
    places = iter(eval_set.positions)
    with torch.no_grad(), autocast():
        for batch in eval_set.loader:
            targets = batch.pop("labels").numpy()
            logits = model(**{name: tensor.to(world.device) for name, tensor in batch.items()}).logits
            correct[list(islice(places, len(targets)))] = logits.argmax(dim=1).cpu().numpy() == targets
    return Outcome(losses, correct)


def optimization(
    model: torch.nn.Module, settings: Settings, recipe: Variant, plan: BatchPlan, rate: float, world: World
) -> tuple[torch.optim.Optimizer, LRScheduler]:
    if recipe.optimizer == "AdamW":
        usual = build_optimizer(model, settings, rate, DDP(settings, world))
        return usual, build_scheduler(usual, settings, plan.total_steps)
    betas = (settings.adam_beta1, settings.adam_beta2)
    # With the kernel that torch chooses, as the usual script gets it; fused only rounds differently.
    adam = torch.optim.Adam(model.parameters(), lr=rate, betas=betas, eps=settings.adam_epsilon)
    return adam, get_scheduler("constant", adam)


class SimulatedRank:
    """One rank's rows and random stream, as app.ddp_loop would give them to a process of its own."""

    def __init__(self, loader: Any, seed: int, plan: BatchPlan, device: torch.device) -> None:
        self.loader, self.plan, self.device = loader, plan, device
        set_seed(seed)
        self.leave()

    def batches(self, step: int) -> Iterator[dict[str, torch.Tensor]]:
        """Enters the rank's random stream, and deals its micro-batches of a step, counted from 0."""
        if step % self.plan.steps_per_epoch == 0:
            self.loader.sampler.set_epoch(step // self.plan.steps_per_epoch)
            self.coming = iter(self.loader)
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(self.stream, self.device)
        else:
            torch.set_rng_state(self.stream)
        for batch in islice(self.coming, self.plan.accumulation_steps):
            yield {name: tensor.to(self.device) for name, tensor in batch.items()}

    def leave(self) -> None:
        on_gpu = self.device.type == "cuda"
        self.stream = torch.cuda.get_rng_state(self.device) if on_gpu else torch.get_rng_state()


def simulate_ranks(
    settings: Settings, recipe: Variant, reviews: Reviews, plan: BatchPlan, world: World
) -> Iterator[SimulatedRank]:
    mine = reviews.split.train
    collator = Collator(
        reviews.tokenizer,
        padding="max_length" if recipe.padding == "max_length" else True,
        max_length=settings.max_length if recipe.padding == "max_length" else None,
    )
    for rank in range(plan.ranks):
        place = replace(world, rank=rank, size=plan.ranks, local_rank=rank, local_size=plan.ranks)
        loader = build_train_loader(reviews.rows.select(mine), reviews.lengths[mine], collator, plan, place, settings)
        yield SimulatedRank(loader, settings.seed + recipe.dropout_seed + rank, plan, world.device)


def counted(correct: NDArray[np.bool_], ranks: int) -> NDArray[np.bool_]:
    """The rows that `DistributedSampler` deals to all ranks together, the first ones again where shares are uneven."""
    n = len(correct)
    shares = [DistributedSampler(range(n), ranks, rank, shuffle=False) for rank in range(ranks)]  # type: ignore[arg-type, var-annotated]
    return np.concatenate([correct[list(share)] for share in shares]) if ranks > 1 else correct


# ---- what came out --------------------------------------------------------------------------------------------------


def effect(pairs: list[tuple[Outcome, Outcome]], recipe: Variant) -> dict[str, Any]:
    """What a difference does, over (ours, with the difference) of each seed.

    `accuracy` counts as the usual script does: hits over the number of test rows, even where rows were counted twice.
    """
    n_test = len(pairs[0][0].correct)
    theirs = [float(b.correct.sum() / n_test) for _, b in pairs]
    ours = [float(a.correct.mean()) for a, _ in pairs]
    gaps = [np.abs(np.subtract(*_common(a.losses, b.losses))) for a, b in pairs]
    firsts = [int(gap.nonzero()[0][0]) + 1 if gap.any() else None for gap in gaps]
    same_rows = recipe.split == Variant().split and recipe.counted_ranks == 1
    statistics = paired_seeds(theirs, ours)
    return {
        "recipe": asdict(recipe),
        "first_differing_steps": firsts,
        "mean_loss_difference": _finite(np.mean([gap.mean() for gap in gaps])),
        "max_loss_difference": _finite(np.max([gap.max() for gap in gaps])),
        "accuracies": theirs,
        "accuracy_difference": statistics.mean_a - statistics.mean_b,
        "interval": _bounds(statistics.difference),
        "p_value": statistics.p_value,
        "changed_rows": float(np.mean([(a.correct != b.correct).sum() for a, b in pairs])) if same_rows else None,
        "counted_rows": len(pairs[0][1].correct),
    }


def _common(a: list[float], b: list[float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    steps = min(len(a), len(b))
    return np.asarray(a[:steps]), np.asarray(b[:steps])


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def _bounds(interval: Interval | None) -> list[float] | None:
    return [interval.low, interval.high] if interval else None


def as_markdown(ablation: dict[str, Any]) -> str:
    return markdown_environment().get_template("ablation.md.j2").render(ablation=ablation)
