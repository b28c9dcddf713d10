"""Plans of models of which only the shapes count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from helpers.worlds import batch_plan
from torch import nn

from app.distributed.world import Topology
from app.plan.empty_model import MicroBatch
from app.plan.step import Plan
from app.settings import Settings


class Block(nn.ParameterList):
    pass


class Shapes(nn.Module):
    """A model of which only the shapes of the parameters count. The first ones are blocks of one parameter each."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32, blocks: int = 0) -> None:
        super().__init__()
        self._no_split_modules = ["Block"]
        self.config = SimpleNamespace(num_hidden_layers=blocks)
        weights = [nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape in shapes]
        self.blocks = nn.ModuleList(Block([weight]) for weight in weights[:blocks])
        self.weights = nn.ParameterList(weights[blocks:])


def plan_of(
    model: Any, strategy: str, topology: Topology, *, per_rank: int = 1, accumulation: int = 1, **changes: Any
) -> Plan:
    """A plan in which each rank has some logical ranks. `changes` are settings, or fields of the plan."""
    order = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Plan(
        device=changes.pop("device", torch.device("cpu")),
        cpu_offload=changes.pop("cpu_offload", False),
        settings=Settings(strategy=strategy, **changes),
        strategy=strategy,
        model=model,
        order=order,
        batches=batch_plan(topology.ranks, per_rank * topology.ranks, accumulation),
        topology=topology,
        run=lambda *_: MicroBatch(model, order, 0, 0),
    )
