"""Why DDP exchanges gradients in buckets, during the backward pass: the steps of Li et al. 2020, section 3.2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pandas as pd
import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from transformers import PreTrainedModel

from ..common.formats import MIB
from ..data.batches import BatchPlan
from ..distributed.collectives import all_gather_object
from ..distributed.world import World
from ..settings import Settings
from ..strategies.base import GradientTree, add_gradients_per_block
from ..strategies.ddp import DDPStrategy
from .core import Lab, compared
from .steps import PlainDDP, Variant, plain_ddp, time_steps

AFTER_BACKWARD = {  # MiB of the buffers into which gradients are copied; None: no exchange
    "no exchange": None,
    "after backward, per parameter": 0.0,
    "after backward, one buffer": float("inf"),
    "after backward, 25 MiB": 25.0,
}
BUCKETS = {"DDP, per parameter": 1 / MIB} | {f"DDP, {size:g} MiB": size for size in (0.0625, 0.25, 1, 5, 25)}


class ExchangeAfterBackward(DDPStrategy):
    """Average gradients when the backward pass is complete: what a loop does without DDP."""

    def __init__(self, settings: Settings, plan: BatchPlan, world: World, *, mib: float | None) -> None:
        super().__init__(settings, plan, world)
        self.mib = mib

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:  # type: ignore[override]
        model.to(self.world.device)
        if isinstance(model, PreTrainedModel):
            add_gradients_per_block(model)  # as DDPStrategy does, so that gradients round in the same way
        self.tree = GradientTree(model, self.plan, allow_unused=True)
        return model

    @contextmanager
    def accumulate(self, wrapped: torch.nn.Module, number: int) -> Iterator[None]:
        yield
        if number + 1 == self.plan.micro_batches_per_step:
            gradients = [p.grad.div_(self.world.size) for p in reversed(self.tree.parameters) if p.grad is not None]
            if self.mib == 0:
                for gradient in gradients:
                    dist.all_reduce(gradient)
            elif self.mib is not None:
                exchange(gradients, self.mib * MIB)


def exchange(gradients: list[torch.Tensor], limit: float) -> None:
    """Sum gradients in buffers of up to `limit` bytes, all of which are in flight at the same time. Collective."""
    buckets = list(_take_tensors(gradients, limit))
    flat = [_flatten_dense_tensors(bucket) for bucket in buckets]
    works = [dist.all_reduce(buffer, async_op=True) for buffer in flat]
    for bucket, buffer, work in zip(buckets, flat, works, strict=True):
        work.wait()
        torch._foreach_copy_(list(bucket), list(_unflatten_dense_tensors(buffer, bucket)))


def ladder(lab: Lab) -> None:
    """From an exchange after the backward pass to DDP

    One all-reduce per parameter after the backward pass costs a latency each; one buffer for all costs none to speak
    of, but nothing is hidden; DDP hides its buckets behind the backward pass: small ones begin early, but each costs a
    latency. All variants but the first one compute the same gradients: the last column compares their losses.
    """
    settings = plain_ddp(lab.settings, logical_ranks=None, ddp_bucket_cap_mb=None)
    variants: dict[str, Variant] = {
        name: (settings, partial(ExchangeAfterBackward, mib=mib)) for name, mib in AFTER_BACKWARD.items()
    }
    variants |= {"DDP, default": (settings, PlainDDP)}
    variants |= {name: (settings, partial(PlainDDP, mib=mib)) for name, mib in BUCKETS.items()}
    times, losses = time_steps(lab, variants)
    frame = compared(times)
    own = losses.sub(losses["DDP, default"], axis=0).abs().max()
    largest = pd.concat(all_gather_object(own, lab.world), axis=1).max(axis=1)
    frame["losses differ by"] = largest.map("{:.1e}".format)
    lab.page.numbers["loss_differences"] = largest.to_dict()
    lab.page.table("Time per step", frame)
