"""Benchmark: bytes of parameters, gradients and optimizer state per rank under each strategy, next to the formula.

    torchrun --nproc_per_node=4 -m app.bench.memory --csv reviews.csv

Trains one step of a BERT of 4 layers x 512 under each strategy, and adds up the memory behind the tensors that a rank
holds: its parameters and optimizer state after the step, and its gradients right before the update.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, set_seed

from app.bench.harness import distribute
from app.cli import launch
from app.distributed.collectives import all_gather_object
from app.distributed.process_group import join
from app.distributed.world import World
from app.settings import Settings
from app.strategies.planner import training_state_bytes
from app.strategies.shards import local_part
from app.training.build import ReviewData, build_data
from app.training.console import quiet_libraries
from app.training.optim import build_optimizer, build_scheduler

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
CONFIG = BertConfig(num_hidden_layers=4, hidden_size=512, num_attention_heads=8, intermediate_size=2048)
MIB = 2**20
HEADER = """\
| strategy | rank | parameters (MiB) | gradients | optimizer | together | formula | difference |
|---|---|---|---|---|---|---|---|"""


def main(settings: Settings) -> None:
    with join(settings) as world:
        quiet_libraries(world)
        data = build_data(settings, world)
        world.print_main(HEADER)
        for strategy in STRATEGIES:
            measure(strategy, settings, data, world)


def measure(strategy: str, settings: Settings, data: ReviewData, world: World) -> None:
    """Train one step and print one line per rank. Collective."""
    set_seed(settings.seed)
    model: Any = BertForSequenceClassification(CONFIG).to(world.device)  # type: ignore[arg-type]
    parameters = [torch.empty_like(parameter, device="meta") for parameter in model.parameters()]
    groups = [[p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]]
    predicted = training_state_bytes(groups, strategy, world.size)
    bench = distribute(replace(settings, strategy=strategy), data, model, world)  # type: ignore[arg-type]
    optimizer = build_optimizer(bench.wrapped, bench.settings, 1e-4, bench.strategy)
    local = bench.strategy.local_optimizer(optimizer)
    gradients = 0

    def measure_gradients(*_: Any) -> None:
        nonlocal gradients
        gradients = storage_bytes(p.grad for p in bench.model.parameters() if p.grad is not None)

    local.register_step_pre_hook(measure_gradients)
    micro_batches = islice(iter(bench.loader), bench.data.plan.micro_batches_per_step)
    bench.train_steps(micro_batches, optimizer, build_scheduler(optimizer, settings, 2), steps=1)
    moments = (value for state in local.state.values() for key, value in state.items() if key != "step")
    mine = (storage_bytes(bench.model.parameters()), gradients, storage_bytes(moments))
    for rank, measured in enumerate(all_gather_object(mine, world)):
        together = sum(measured)
        cells = [f"{part / MIB:.1f}" for part in (*measured, together, predicted[rank])]
        world.print_main(f"| {strategy} | {rank} | {' | '.join(cells)} | {together / predicted[rank] - 1:+.1%} |")


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the size of the memory behind tensors, of which several may share memory."""
    storages = [local_part(tensor.detach()).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


if __name__ == "__main__":
    launch(main, __doc__)
