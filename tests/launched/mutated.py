"""app.ddp_loop with one deliberate change that no file of the run tells of: MUTATION names it."""

from __future__ import annotations

import dataclasses
import os

import torch
import transformers

import app.ddp_loop as loop
import app.training.build as preparation
from app.cli import launch
from app.data.sampler import FullBatchSampler


def another_seed():
    """For the dropout alone: rows, order and initial weights stay."""
    loop.set_seed = lambda seed: transformers.set_seed(seed + 1)


def one_weight():
    """The next larger float32, in one of a million and a half."""
    load = preparation.load_classifier

    def load_another(*arguments):
        classifier = load(*arguments)
        weight = classifier.model.classifier.weight.data
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(torch.inf))
        return classifier

    preparation.load_classifier = load_another


def one_label():
    """Of the last row of the first step, as `--train_sampling_strategy random` deals them."""
    read = preparation.read_and_split

    def read_another(settings, world_size):
        table, split, plan = read(settings, world_size)
        order = torch.randperm(len(split.train), generator=torch.Generator().manual_seed(settings.seed))
        labels = table.labels.copy()
        labels[split.train[order[plan.global_size - 1]]] ^= 1
        return dataclasses.replace(table, labels=labels), split, plan

    preparation.read_and_split = read_another


def the_clip_value():
    clip = torch.nn.utils.clip_grad_norm_
    torch.nn.utils.clip_grad_norm_ = lambda parameters, norm: clip(parameters, norm * 0.999)


def the_ranks_rows():
    """The same global batches; two ranks have swapped their shares, and so their rows get other dropout masks."""
    construct = FullBatchSampler.__init__

    def construct_another(self, n_rows, batch_size, world, seed):
        construct(self, n_rows, batch_size, dataclasses.replace(world, rank=world.size - 1 - world.rank), seed)

    FullBatchSampler.__init__ = construct_another


def nothing():
    pass


if __name__ == "__main__":
    globals()[os.environ["MUTATION"]]()
    launch(loop.main, None)
