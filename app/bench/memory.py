"""Benchmark: the memory of each strategy, next to what app.plan predicts.

    torchrun --nproc_per_node=2 -m app.bench.memory --model bert-base-chinese
    torchrun --nproc_per_node=4 -m app.bench.memory --model 4x312

Trains a few steps under each strategy. It adds up the memory behind the tensors that a rank holds: its parameters and
optimizer state after a step, and its gradients right before an update. The activations are what the allocator has given
out in the forward pass of a micro-batch, with dropout masks as in training, and not got back by its end. Rows are those
of the bundled sample, unless --csv or --dataset_name is given, and padded to `--max_length`, as app.plan assumes.
Besides other models, `--model` takes 4x312, 4x512 and 12x768, which are untrained BERTs. Ends with exit status 1 if a
measured number differs from the predicted one by more than 0.5%.
"""

from __future__ import annotations

from ..program import Program
from ..settings import OF_A_STEP, Settings
from .models import measure_tiny_bert

PROGRAM = Program(__doc__, measure_tiny_bert, only=OF_A_STEP)
if __name__ == "__main__":
    PROGRAM.check_command_line()  # before torch is imported, which takes seconds

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import BatchEncoding

from ..common.formats import MIB
from ..model.dropout import RowDropout
from ..model.inputs import to_device
from ..model.load import mixed_precision
from ..plan.memory import gathered_after_forward, plan_memory
from ..plan.step import Plan
from ..profiling.profiler import hide_profiler_messages
from ..strategies.base import local_part
from .planned import MEASURED, PREDICTED, compare_with_plan
from .steps import Bench

TOLERANCE = 0.005  # of a predicted number, which leaves out a few small tensors


def main(settings: Settings) -> None:
    compare_with_plan(settings, measure, TOLERANCE)


def measure(bench: Bench, plan: Plan) -> pd.DataFrame:
    """Train a few steps, and return this rank's memory in MiB. Collective."""
    optimization = bench.optimization(3)
    local = bench.strategy.local_optimizer(optimization.optimizer)
    gradients = 0

    def measure_gradients(*_: Any) -> None:
        nonlocal gradients
        gradients = storage_bytes(p.grad for p in bench.model.parameters() if p.grad is not None)

    local.register_step_pre_hook(measure_gradients)
    batches = cycle(bench.loader)  # the data may have fewer steps
    # DDP replaces its buckets at the beginning of the second step.
    bench.train_steps(batches, optimization, steps=2)
    activations = measure_forward(bench, next(batches))
    moments = (value for state in local.state.values() for key, value in state.items() if key != "step")
    planned = plan_memory(plan)[bench.world.rank]
    figures = {
        "parameters": (planned.parameters, storage_bytes(bench.model.parameters())),
        "gradients": (planned.gradients, gradients),
        "optimizer state": (planned.optimizer, storage_bytes(moments)),
        "activations": (plan.activations().saved + gathered_after_forward(plan), activations),
    }
    table = pd.DataFrame.from_dict(figures, orient="index", columns=[PREDICTED, MEASURED])
    return table.rename_axis("MiB") / MIB


def measure_forward(bench: Bench, batch: dict[str, torch.Tensor]) -> int:
    """Return the bytes that a forward pass, with masks as in training, leaves allocated for its backward pass."""
    world, settings, labels = bench.world, bench.settings, batch["labels"]
    rows = BatchEncoding({name: tensor for name, tensor in batch.items() if name != "labels"})
    length = settings.max_length
    padded = bench.data.tokenizer.pad(rows, padding="max_length", max_length=length, return_tensors="pt")
    masks = RowDropout(settings.seed, 2, bench.data.plan.rows_of(bench.strategy.logical_ranks[0], 0))
    bench.wrapped.train()
    with allocated(world.device) as count, mixed_precision(settings.precision, world.device), masks:
        loss = bench.wrapped(**to_device({**padded, "labels": labels}, bench.model, world)).loss
    loss.backward()
    return count[0]


@contextmanager
def allocated(device: torch.device) -> Iterator[list[int]]:
    """Yield a list that gets one number at the end of the block: the bytes allocated in it and not freed."""
    count: list[int] = []
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        yield count
        count.append(torch.cuda.memory_allocated(device) - before)
        return
    hide_profiler_messages()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield count
    events = profiler.profiler.kineto_results.events()
    count.append(sum(event.nbytes() for event in events if event.name() == "[memory]"))


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the size of the memory behind tensors, of which several may share memory."""
    storages = [local_part(tensor.detach()).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


if __name__ == "__main__":
    PROGRAM.launch(main)
