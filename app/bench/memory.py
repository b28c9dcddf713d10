"""Benchmark: the memory of each strategy, next to what app.plan predicts.

    torchrun --nproc_per_node=2 -m app.bench.memory --model bert-base-chinese
    torchrun --nproc_per_node=4 -m app.bench.memory --sizes

Trains a few steps under each strategy. It adds up the memory behind the tensors that a rank holds: its parameters and
optimizer state after a step, and its gradients right before an update. The activations are what the allocator has given
out in the forward pass of a micro-batch and not got back by its end. Rows are padded to `--max_length`, as app.plan
assumes. With `--sizes`, the models are BERTs of three sizes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import BatchEncoding

from ..common.errors import UserError
from ..common.formats import markdown_table, mib
from ..distributed.collectives import all_gather_object, raise_on_all_ranks
from ..distributed.process_group import join
from ..distributed.world import World
from ..flags import BENCHMARKS, SIZES, add_memory_flags
from ..model.inputs import to_device
from ..model.precision import mixed_precision
from ..model.vocabulary import trimmed_vocabulary
from ..plan.memory import gathered_after_forward
from ..plan.step import plan_step
from ..profiling.profiler import hide_profiler_messages
from ..program import launch
from ..setting_groups import TINY_BERT
from ..settings import Settings
from ..strategies.base import local_part
from ..training.build import ReviewData, build_data
from ..training.console import quiet_libraries
from .steps import Bench, build_named, distribute, with_each_strategy

KINDS = ("parameters", "gradients", "optimizer", "sum", "predicted", "", "activations", "predicted", "")


def main(settings: Settings, sizes: bool) -> None:
    with join(settings) as world:
        with raise_on_all_ranks(world):
            if sizes and settings.model != TINY_BERT:
                raise UserError("--sizes and --model exclude each other: give only one of them")
        quiet_libraries(world)
        data = build_data(settings, world)
        world.print_main("In MiB:\n")
        world.print_main(markdown_table(["model", "strategy", "rank", *KINDS], [], text_columns=2).rstrip())
        for name in SIZES if sizes else [settings.model]:
            for with_strategy in with_each_strategy(settings):
                measure(name, with_strategy, data=data, world=world)


def measure(name: str, settings: Settings, *, data: ReviewData, world: World) -> None:
    """Train a few steps and print one line per rank. Collective."""
    model = build_named(name, settings, data, world=world, trim=False)
    config, vocabulary = copy.deepcopy(model.config), trimmed_vocabulary(model)
    bench = distribute(settings, data, model, world=world)
    with raise_on_all_ranks(world):
        plan = plan_step(
            settings,
            config,
            bench.data.plan,
            n_tokens=None if vocabulary is None else len(vocabulary.used),
            device=world.device,
            topology=world.topology,
        )
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
    state = (storage_bytes(bench.model.parameters()), gradients, storage_bytes(moments))
    predicted_state = plan.memory(settings.strategy)[world.rank].state
    predicted = plan.activations(settings.strategy).saved + gathered_after_forward(
        plan.model, settings.strategy, plan.options
    )
    measured = (state, predicted_state, activations, predicted)
    for rank, (state, predicted_state, activations, predicted) in enumerate(all_gather_object(measured, world)):
        cells = [*map(mib, state), *compare(sum(state), predicted_state), *compare(activations, predicted)]
        world.print_main(f"| {name} | {settings.strategy} | {rank} | {' | '.join(cells)} |")


def measure_forward(bench: Bench, batch: dict[str, torch.Tensor]) -> int:
    """Return the bytes that a forward pass leaves allocated for its backward pass."""
    world, labels = bench.world, batch["labels"]
    length = bench.settings.max_length
    rows = BatchEncoding({name: tensor for name, tensor in batch.items() if name != "labels"})
    padded = bench.data.tokenizer.pad(rows, padding="max_length", max_length=length, return_tensors="pt")
    bench.wrapped.train()
    with allocated(world.device) as count, mixed_precision(bench.settings.precision, world.device):
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


def compare(measured: int, predicted: int) -> list[str]:
    """Return a measured and a predicted size in MiB, and how much the measured one differs."""
    return [mib(measured), mib(predicted), f"{measured / predicted - 1:+.1%}"]


if __name__ == "__main__":
    launch(main, __doc__, add_memory_flags, rejected=BENCHMARKS["bench.memory"])
