"""Deliberate changes of one training run that none of its files records: each a context manager, by its name."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import app.strategies.optimization
import app.training.build
from app.distributed.world import World
from app.model.dropout import RowDropout
from app.strategies.fsdp import FullyShardStrategy
from app.strategies.reduction import FixedOrderAllReduce, sum_pairwise


@contextmanager
def one_weight(world: World) -> Iterator[None]:
    """One of 1.5 million initial weights becomes the next larger float32."""
    load = app.training.build.load_classifier

    def load_changed(*arguments: Any, **names: Any) -> Any:
        classifier = load(*arguments, **names)
        weight = classifier.model.classifier.weight.data
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(torch.inf))
        return classifier

    with patch.object(app.training.build, "load_classifier", load_changed):
        yield


@contextmanager
def swapped_leaves(world: World) -> Iterator[None]:
    """The second and the third of the ranks' gradients swap their places in the tree."""

    def sum_swapped(parts: torch.Tensor) -> torch.Tensor:
        return sum_pairwise(parts[[0, 2, 1, 3]] if len(parts) == 4 else parts)

    with patch_everywhere("sum_pairwise", sum_swapped):
        yield


@contextmanager
def physical_dropout(world: World) -> Iterator[None]:
    """The dropout masks depend on the process, not on the rows."""

    class ByProcess(RowDropout):
        def __init__(self, seed: int, step: int, rows: range) -> None:
            super().__init__(seed, step, range(world.rank, world.rank + len(rows) * world.size, world.size))

    with patch_everywhere("RowDropout", ByProcess):
        yield


@contextmanager
def fp32_norm(world: World) -> Iterator[None]:
    """The squares of the gradients are summed in fp32."""

    def sum_in_fp32(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        # One after another: some kernels add in pairs, whose errors may happen to cancel.
        squares = np.concatenate([tensor.square().flatten().numpy() for tensor in tensors])
        return torch.tensor(np.add.accumulate(squares, dtype=np.float32)[-1])

    with patch_everywhere("sum_of_squares", sum_in_fp32):
        yield


@contextmanager
def large_loss_scale(world: World) -> Iterator[None]:
    """The first loss scales of fp16 are too large."""
    with patch.object(app.strategies.optimization, "INITIAL", 2.0**22):
        yield


@contextmanager
def exchange_that_does_not_wait(world: World) -> Iterator[None]:
    """On GPUs, the stream on which gradients are exchanged does not wait for the backward pass."""
    exchange = FixedOrderAllReduce.exchange

    def exchange_at_once(self: FixedOrderAllReduce, *arguments: Any, **more: Any) -> Any:
        with patch.object(type(self.stream), "wait_stream", lambda *_: None):
            return exchange(self, *arguments, **more)

    with patch.object(FixedOrderAllReduce, "exchange", exchange_at_once):
        yield


@contextmanager
def memory_that_is_not_recorded(world: World) -> Iterator[None]:
    """On GPUs, the allocator does not know that rounded gradients are used on another stream."""
    with patch.object(type(torch.empty(0, device=world.device)), "record_stream", lambda *_: None):
        yield


@contextmanager
def norm_on_the_cpu(world: World) -> Iterator[None]:
    """With offloaded gradients, the norm of a shard stays on the CPU."""
    clip = FullyShardStrategy.clip_grad_norm

    def clip_on_cpu(self: FullyShardStrategy, *arguments: Any) -> torch.Tensor:
        with patch.object(self, "world", dataclasses.replace(world, device=torch.device("cpu"))):
            return clip(self, *arguments)

    with patch.object(FullyShardStrategy, "clip_grad_norm", clip_on_cpu):
        yield


@contextmanager
def patch_everywhere(name: str, replacement: Any) -> Iterator[None]:
    """Replace a function in every module of the application that has imported it."""
    modules = [module for key, module in sys.modules.items() if key.startswith("app.") and hasattr(module, name)]
    assert modules, f"there is no {name}"
    with ExitStack() as patches:
        for module in modules:
            patches.enter_context(patch.object(module, name, replacement))
        yield


MUTATIONS = {
    mutation.__name__: mutation
    for mutation in (
        *(one_weight, swapped_leaves, physical_dropout, fp32_norm, large_loss_scale),
        *(exchange_that_does_not_wait, memory_that_is_not_recorded, norm_on_the_cpu),
    )
}
