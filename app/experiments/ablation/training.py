"""Train a variant by the training step of app.ddp_loop, with its batches, initial weights and dropout masks.

One process simulates all ranks, as with --logical_ranks. A variant differs from its baseline in one thing, so any
difference in the results is its effect.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from ...data.loaders import Collator, loader_options
from ...data.sampler import BatchPlan, plan_batches
from ...ddp_loop import Batch, evaluate, train_step
from ...distributed.world import World
from ...model.dropout import RowDropout
from ...model.inputs import to_device
from ...model.precision import mixed_precision
from ...record.steps import mean
from ...settings import Settings
from ...strategies.base import Strategy
from ...strategies.ddp import DDPStrategy
from ...strategies.optimization import LossScale, Optimization
from ...training.build import ReviewData, build_model
from ...training.step import build_optimizer, build_scheduler, default_learning_rate
from .rows import rows_of_steps
from .variants import Optimizer, Variant, variant_settings

# Steps after which weights are compared for the first time. Later, differences of rounding have grown.
EARLY = 10
# Momentum, and the learning rate as a multiple of Adam's: Adam's steps do not shrink with the gradients.
SGD: dict[Optimizer, tuple[float, float]] = {
    "SGD, not clipped": (0.0, 100),
    "SGD with momentum, not clipped": (0.9, 10),
}

TakeStep = Callable[[Sequence[Batch], int], torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """The result of one training."""

    losses: list[float]  # of each step, as the script would log it
    correct: NDArray[np.bool_]  # (n_test,), whether each test row was classified correctly, in file order
    trained_test_rows: float = 0.0  # the share of the test rows on which the model was trained
    early_weights: torch.Tensor | None = None  # after `EARLY` steps, flattened; None if there are fewer
    weights: torch.Tensor | None = None  # at the end, flattened


def train_variant(settings: Settings, variant: Variant, data: ReviewData, *, ranks: int, world: World) -> Outcome:
    """Train one variant, and return its losses, its weights and which test rows it classifies correctly."""
    settings = variant_settings(settings, variant, ranks)
    plan = plan_batches(settings, len(data.split.train), world.size)
    data = replace(data, plan=plan)
    classifier = build_model(settings, data, world)
    model = classifier.model
    if variant.inflation != 1:
        model.register_forward_hook(partial(inflate_loss, factor=variant.inflation))
    rows = rows_of_steps(settings, variant, data)
    collator = data.collator
    if variant.padding == "max_length":
        collator = Collator(data.tokenizer, padding="max_length", max_length=settings.max_length)
    loader = DataLoader(
        data.rows, plan.micro_size, sampler=rows.ravel().tolist(), **loader_options(collator, world.device)
    )

    # A training step uses the seed for dropout only.
    reseeded = replace(settings, seed=settings.seed + variant.dropout_seed)
    strategy = DDPStrategy(settings, plan, world)
    learning_rate = settings.learning_rate or default_learning_rate(classifier.pretrained)
    make_optimizer = partial(
        build_variant_optimizer, variant=variant, settings=settings, learning_rate=learning_rate, strategy=strategy
    )
    if variant.averaging_interval:
        model.to(world.device)  # type: ignore[arg-type]  # of a decorator in transformers
        replicas = Replicas(model, plan, make_optimizer=make_optimizer, interval=variant.averaging_interval)
        take_step: TakeStep = partial(replicas.train_step, settings=reseeded, is_last_of=len(rows))
    else:
        wrapped = strategy.wrap(model)
        optimizer = make_optimizer(wrapped)
        scheduler = build_scheduler(optimizer, settings, len(rows))
        optimization = Optimization(optimizer, scheduler, LossScale(settings.precision, plan, world))

        def take_step(batches: Sequence[Batch], step: int) -> torch.Tensor:
            return train_step(wrapped, batches, step, optimization=optimization, strategy=strategy, settings=reseeded)[
                0
            ]

    losses, early_weights, micro_batches = [], None, iter(loader)
    for step in range(len(rows)):
        batches = [to_device(batch, model, world) for batch in islice(micro_batches, plan.micro_batches_per_step)]
        losses.append(take_step(batches, step))
        if step + 1 == EARLY:
            early_weights = flatten_weights(model)

    test_set = data.eval_set("test", settings, world)
    _, logits = evaluate(model, test_set, settings, world=world)
    return Outcome(
        [mean(step.tolist()) for step in losses],
        logits.argmax(axis=1) == test_set.labels,
        trained_test_rows=float(np.isin(data.split.test, rows).mean()),
        early_weights=early_weights,
        weights=flatten_weights(model),
    )


class Replicas:
    """Averaged parameters instead of averaged gradients: each rank updates its own copy of the model.

    This process holds the copies of all ranks. As with DDP, they start with equal weights, and each rank computes the
    gradients of its rows. But its optimizer uses these gradients alone, and the weights are averaged afterwards.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plan: BatchPlan,
        *,
        make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
        interval: int,
    ) -> None:
        """
        Args:
            model: rank 0's copy.
            interval: steps from one average to the next one.
        """
        self.plan, self.interval = plan, interval
        self.models = [model, *(copy.deepcopy(model) for _ in range(1, plan.logical_ranks))]
        self.optimizers = [make_optimizer(model) for model in self.models]

    def train_step(self, batches: Sequence[Batch], step: int, *, settings: Settings, is_last_of: int) -> torch.Tensor:
        """Train each rank's copy on its micro-batches, and return their losses. Gradients are not clipped."""
        remaining, losses = iter(batches), []
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            model.train()
            for micro_batch in range(self.plan.accumulation_steps):
                batch = next(remaining)
                masks = RowDropout(settings.seed, step, self.plan.rows_of(rank, micro_batch))  # as in app.ddp_loop
                with mixed_precision(settings.precision, batch["labels"].device), masks:
                    loss = model(**batch).loss
                (loss / self.plan.accumulation_steps).backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        # Once more after the last step, so that all ranks evaluate the same model.
        if (step + 1) % self.interval == 0 or step + 1 == is_last_of:
            self.average()
        return torch.stack(losses)

    @torch.no_grad()
    def average(self) -> None:
        """Give all copies the mean of their parameters. A real job would call `dist.all_reduce` for each of them."""
        for copies in zip(*(model.parameters() for model in self.models), strict=True):
            mean_of_ranks = torch.stack(copies).mean(dim=0)
            for parameter in copies:
                parameter.copy_(mean_of_ranks)


def build_variant_optimizer(
    model: torch.nn.Module, *, variant: Variant, settings: Settings, learning_rate: float, strategy: Strategy
) -> torch.optim.Optimizer:
    """Build this project's AdamW, which is Adam without decay, or SGD."""
    if variant.optimizer not in SGD:
        return build_optimizer(model, settings, learning_rate, strategy=strategy)
    momentum, factor = SGD[variant.optimizer]
    return torch.optim.SGD(model.parameters(), lr=factor * learning_rate, momentum=momentum, fused=True)


def flatten_weights(model: torch.nn.Module) -> torch.Tensor:
    """Return a copy of all parameters, (n,), on the CPU."""
    return torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])


def inflate_loss(model: torch.nn.Module, inputs: Any, output: Any, *, factor: int) -> None:
    """Multiply the loss that a model returns, as a forward hook. Without labels, it returns none."""
    if output.loss is not None:
        output.loss = output.loss * factor
