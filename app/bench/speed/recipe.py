"""What is compared: a recipe trains a model for some optimizer steps, and counts what it has trained on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ...distributed.collectives import all_gather_object
from ...distributed.world import World
from ...flags import BF16
from ...training.build import ReviewData


@dataclass(frozen=True)
class Count:
    """What a recipe has trained on."""

    examples: int
    tokens: int  # without padding
    padded_tokens: int  # tokens and padding

    def summed(self, world: World) -> Count:
        """Return the sum over all ranks. Collective."""
        return Count(*(sum(numbers) for numbers in zip(*all_gather_object(astuple(self), world), strict=True)))


@dataclass(frozen=True)
class Recipe:
    """One way to train a model.

    Attributes:
        model: the model whose floating-point operations are counted.
        train: train for a number of optimizer steps. Collective.
        count: return what the latest steps, as many as given, have trained on, over all ranks. Collective.
        end: end the training.
    """

    model: PreTrainedModel
    train: Callable[[int], None]
    count: Callable[[int], Count]
    end: Callable[[], None]


@dataclass(frozen=True)
class Task:
    """What all recipes have in common.

    Attributes:
        data: the reviews, their split and their tokens.
        model: the model with its initial weights, as the training paths build it.
        rounds: how often each recipe trains for `steps` optimizer steps, the warm-up included.
    """

    data: ReviewData
    model: PreTrainedModel
    steps: int
    rounds: int

    @property
    def batch_size(self) -> int:
        """The rows of an optimizer step on each rank."""
        return self.data.plan.global_size // self.data.plan.ranks

    @property
    def total_steps(self) -> int:
        return self.steps * self.rounds


def precision_of(name: str) -> str:
    """Return the precision that a recipe trains in, by its name."""
    return "bf16" if name.endswith(BF16) else "fp32"


def plain_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model with the same weights as transformers builds it: its own attention, and no hooks."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = None
    plain: PreTrainedModel = type(model)(config)
    plain.load_state_dict(model.state_dict())
    return plain


class CountingCollator:
    """Form batches with a collator, and keep their attention masks until they are counted.

    A loader may form a batch before the step that trains on it, so `count` is given the number of batches.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate
        self.masks: list[torch.Tensor] = []

    def __call__(self, rows: Any) -> Any:
        batch = self.collate(rows)
        self.masks.append(batch["attention_mask"])
        return batch

    def count(self, batches: int) -> Count:
        """Return what this number of batches, the earliest that have not been counted, contain."""
        counted, self.masks = self.masks[:batches], self.masks[batches:]
        assert len(counted) == batches, f"{batches} steps, but {len(counted)} batches"
        return Count(
            examples=sum(len(mask) for mask in counted),
            tokens=sum(int(mask.sum()) for mask in counted),
            padded_tokens=sum(mask.numel() for mask in counted),
        )
