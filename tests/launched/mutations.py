"""Deliberate changes of one training run that none of its files records: each a context manager, by its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import transformers

import app.ddp_loop
import app.training.build
from app.data.sampler import FullBatchSampler
from app.distributed.world import World


@contextmanager
def dropout_seed(world: World) -> Iterator[None]:
    """Another seed for dropout only: split, order and initial weights stay the same."""
    with patch.object(app.ddp_loop, "set_seed", lambda seed: transformers.set_seed(seed + 1)):
        yield


@contextmanager
def one_weight(world: World) -> Iterator[None]:
    """One of 1.5 million initial weights becomes the next larger float32."""
    load = app.training.build.load_classifier

    def load_changed(*arguments: Any) -> Any:
        classifier = load(*arguments)
        weight = classifier.model.classifier.weight.data
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(torch.inf))
        return classifier

    with patch.object(app.training.build, "load_classifier", load_changed):
        yield


@contextmanager
def one_label(world: World) -> Iterator[None]:
    """The label of the last row of the first step, in the order of `--train_sampling_strategy random`."""
    read = app.training.build.read_and_split

    def read_changed(settings: Any, *arguments: Any) -> Any:
        table, split, plan = read(settings, *arguments)
        order = torch.randperm(len(split.train), generator=torch.Generator().manual_seed(settings.seed))
        labels = table.labels.copy()
        labels[split.train[order[plan.global_size - 1]]] ^= 1
        return dataclasses.replace(table, labels=labels), split, plan

    with patch.object(app.training.build, "read_and_split", read_changed):
        yield


@contextmanager
def clip_value(world: World) -> Iterator[None]:
    """Gradients are clipped to 0.999 of the norm."""
    clip = torch.nn.utils.clip_grad_norm_
    with patch.object(torch.nn.utils, "clip_grad_norm_", lambda parameters, norm: clip(parameters, norm * 0.999)):
        yield


@contextmanager
def swapped_ranks(world: World) -> Iterator[None]:
    """The same global batches, but two ranks swap their rows, which therefore get other dropout masks."""
    construct = FullBatchSampler.__init__

    def construct_swapped(self: Any, n_rows: Any, batch_size: Any, mine: World, seed: int) -> None:
        construct(self, n_rows, batch_size, dataclasses.replace(mine, rank=mine.size - 1 - mine.rank), seed)

    with patch.object(FullBatchSampler, "__init__", construct_swapped):
        yield


MUTATIONS = {
    mutation.__name__: mutation for mutation in (dropout_seed, one_weight, one_label, clip_value, swapped_ranks)
}
