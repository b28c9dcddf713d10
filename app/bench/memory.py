"""Benchmark: the memory of each strategy, next to what app.plan predicts.

    torchrun --nproc_per_node=2 -m app.bench.memory --model bert-base-chinese
    torchrun --nproc_per_node=4 -m app.bench.memory --sizes

Trains a few steps under each strategy. It adds up the memory behind the tensors that a rank holds: its parameters and
optimizer state after a step, and its gradients right before an update. The activations are what the allocator has given
out in the forward pass of a micro-batch and not got back by its end. Rows are padded to `--max_length`, as app.plan
assumes. With `--sizes`, the models are BERTs of three sizes. Ends with exit status 1 if a predicted number differs from
the measured one by more than 2%.
"""

from __future__ import annotations

if __name__ == "__main__":
    from ..program import check_command_line
    from .flags import add_memory_flags

    check_command_line(__doc__, add_memory_flags)

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import BatchEncoding

from ..common.errors import RunError, UserError
from ..common.formats import markdown_table, mib
from ..distributed.collectives import all_gather_object, raise_on_all_ranks
from ..distributed.process_group import join
from ..distributed.world import World
from ..model.dropout import RowDropout
from ..model.inputs import to_device
from ..model.precision import mixed_precision
from ..plan.memory import gathered_after_forward
from ..profiling.profiler import hide_profiler_messages
from ..program import launch
from ..setting_groups import TINY_BERT
from ..settings import Settings
from ..strategies.base import local_part
from ..training.build import ReviewData, build_data
from ..training.console import quiet_libraries
from .flags import SIZES, add_memory_flags
from .steps import Bench, build_planned, with_each_strategy

KINDS = ("parameters", "gradients", "optimizer", "sum", "predicted", "", "activations", "predicted", "")
TOLERANCE = 0.02  # of a predicted number, which leaves out what row dropout keeps besides the masks


def main(settings: Settings, sizes: bool) -> None:
    with join(settings) as world:
        with raise_on_all_ranks(world):
            if sizes and settings.model != TINY_BERT:
                raise UserError("--sizes and --model exclude each other: give only one of them")
        quiet_libraries(world)
        data = build_data(settings, world)
        world.print_main("In MiB:\n")
        world.print_main(markdown_table(["model", "strategy", "rank", *KINDS], [], text_columns=2).rstrip())
        wrong = [
            problem
            for name in (SIZES if sizes else [settings.model])
            for with_strategy in with_each_strategy(settings)
            for problem in measure(name, with_strategy, data=data, world=world)
        ]
        if wrong:
            raise RunError(f"measured memory differs by more than {TOLERANCE:.0%} from the plan: {'; '.join(wrong)}")


def measure(name: str, settings: Settings, *, data: ReviewData, world: World) -> list[str]:
    """Train a few steps, print one line per rank, and return what differs from the plan. Collective."""
    bench, plan = build_planned(name, settings, data, world=world)
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
    gathered = gathered_after_forward(plan.model, settings.strategy, plan.options)
    pairs = {
        "parameters, gradients and optimizer": (sum(state), plan.memory(settings.strategy)[world.rank].state),
        "activations": (activations, plan.activations(settings.strategy).saved + gathered),
    }
    wrong = []
    for rank, (of_rank, pairs_of_rank) in enumerate(all_gather_object((state, pairs), world)):
        cells = [*map(mib, of_rank)]
        for what, (measured, predicted) in pairs_of_rank.items():
            difference = measured / predicted - 1
            cells += [mib(measured), mib(predicted), f"{difference:+.1%}"]
            if abs(difference) > TOLERANCE:
                wrong.append(f"{name}, {settings.strategy}, rank {rank}, {what} {difference:+.1%}")
        world.print_main(f"| {name} | {settings.strategy} | {rank} | {' | '.join(cells)} |")
    return wrong


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
    launch(main, __doc__, add_memory_flags)
