"""A training state whose values are all different, under any strategy and number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedConfig, PreTrainedModel

from app.checkpoint.state import TrainingState
from app.distributed.world import World
from app.model.dropout import seed_generators
from app.settings import Settings
from app.strategies.optimization import LossScale, Optimization
from app.training.build import select_strategy
from helpers.worlds import batch_plan

Layout = tuple[str, int]  # a strategy and a number of ranks


class ModelConfig(PreTrainedConfig):
    model_type = "state-test"


class Model(PreTrainedModel):
    """Two tied matrices, dropout, buffers, a parameter with fewer rows than ranks, and one that is not used."""

    config_class = ModelConfig

    def __init__(self) -> None:
        super().__init__(ModelConfig())
        self.into, self.out, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(3, 5)
        self.out.weight = self.into.weight
        self.classes = nn.Linear(6, 2)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(7))
        self.register_buffer("temporary", torch.zeros(4), persistent=False)
        self.post_init()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.mean += x.mean()
        return self.classes(self.out(self.dropout(self.into(x)))).square().mean()


@dataclass(frozen=True)
class Training(TrainingState):
    """What a checkpoint saves, and the module whose forward and backward passes change it."""

    wrapped: nn.Module


def new_state(layout: Layout, world: World, seed: int, dtype: torch.dtype = torch.float32) -> Training:
    torch.manual_seed(seed)
    settings = Settings(strategy=layout[0], ddp_find_unused_parameters=True, precision="fp16")  # with a loss scale
    strategy = select_strategy(settings, batch_plan(layout[1]), world)
    model = Model().to(dtype)
    for buffer in (model.mean, model.temporary):
        buffer.fill_(seed)
    wrapped = strategy.wrap(model)
    parameters = list(wrapped.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = strategy.build_optimizer(groups, lr=1e-2, fused=True)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    optimization = Optimization(optimizer, scheduler, LossScale(settings.precision, strategy.plan, world))
    return Training(model, optimization, strategy, world, wrapped)


def train(training: Training, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        seed_generators(42, step, 0)
        x = torch.randn(4, 6)
        with training.strategy.accumulate(training.wrapped, 0):
            loss = training.wrapped(x)
            loss.backward()
        training.optimization.optimizer.step()
        training.optimization.scheduler.step()
        training.optimization.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


Reference = dict[str, dict[str, torch.Tensor]]  # by kind of tensor ("model", "step", …) and name


def new_reference(dtype: torch.dtype = torch.float32) -> Reference:
    """A complete state whose values are all different."""
    model, draw = Model().to(dtype), torch.Generator().manual_seed(3)
    names = [name for name, _ in model.named_parameters()]
    with_moments = [name for name in names if not name.startswith("unused")]
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    reference = {"model": {name: torch.randn(shapes[name], dtype=dtype, generator=draw) for name in names}}
    for key in ("exp_avg", "exp_avg_sq"):
        reference[key] = {name: torch.rand(shapes[name], dtype=dtype, generator=draw) for name in with_moments}
    reference["step"] = {name: torch.tensor(float(i)) for i, name in enumerate(with_moments, start=10)}
    reference["model"] |= {"count": torch.tensor(17), "mean": torch.randn(7, dtype=dtype, generator=draw)}
    return reference


def part_of(whole: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """The rows of a parameter that a rank holds."""
    if layout[0] not in ("zero2", "zero3"):
        return whole
    chunks = whole.chunk(layout[1])
    return chunks[rank] if rank < len(chunks) else whole[:0]


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
