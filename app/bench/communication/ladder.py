"""The section of the laboratory on why DDP exchanges gradients in buckets, during the backward pass.

The steps of the ladder are those of Li et al. 2020, sections 3.2 and 5: no exchange, an exchange after the backward
pass in several ways, and DDP with buckets of several sizes. All of them train the same model on the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch.profiler import record_function
from transformers import PreTrainedModel

from ...common.formats import MIB
from ...data.sampler import BatchPlan
from ...distributed.collectives import all_gather_object, raise_on_all_ranks
from ...distributed.world import World
from ...settings import Settings
from ...strategies.base import MICRO_BATCH, add_gradients_per_block
from ...strategies.ddp import DDPStrategy
from ...training.build import ReviewData
from ..page import Section
from .comparison import comparison_section
from .step_variants import Comparison, PlainDDP, Variant, compare, models, plain_ddp

NO_EXCHANGE = "no exchange"
PER_PARAMETER = "after backward, per parameter"
AFTER_BACKWARD = {PER_PARAMETER: 0.0, "after backward, one buffer": float("inf"), "after backward, 25 MiB": 25.0}
DDP_PER_PARAMETER = 1 / MIB  # MiB: any parameter fills a bucket
BUCKETS = {"DDP, per parameter": DDP_PER_PARAMETER}
BUCKETS |= {f"DDP, {size:g} MiB": size for size in (0.0625, 0.25, 1, 5, 25)}

TITLE = "From an exchange after the backward pass to DDP"
ABOUT = (
    "docs/communication.md#the-ladder describes the variants. All but the first one compute the same gradients: the "
    "last column compares their losses."
)


class ExchangeAfterBackward(DDPStrategy):
    """Average gradients when the backward pass is complete: what a loop does without DDP.

    Args:
        bucket_mib: gradients are copied into buffers of this size, which are exchanged at the same time; 0: each
            gradient is exchanged on its own, one after another; None: none is exchanged.
    """

    def __init__(self, settings: Settings, plan: BatchPlan, world: World, *, bucket_mib: float | None) -> None:
        super().__init__(settings, plan, world)
        self.bucket_mib = bucket_mib

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:  # type: ignore[override]
        """Return the model itself. All ranks have built it from the same seed."""
        model.to(self.world.device)
        if isinstance(model, PreTrainedModel):
            add_gradients_per_block(model)  # as DDPStrategy does, so that the gradients round in the same way
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return model

    @contextmanager
    def accumulate(self, wrapped: torch.nn.Module, number: int) -> Iterator[None]:
        with record_function(MICRO_BATCH):
            yield
            if number + 1 == self.plan.micro_batches_per_step:
                self.check_gradients(wrapped)
                self._average()

    def _average(self) -> None:
        # Divided first, as DDP does.
        gradients = [p.grad.div_(self.world.size) for p in self.parameters if p.grad is not None]
        if self.bucket_mib is None:
            return
        if self.bucket_mib == 0:
            for gradient in gradients:
                dist.all_reduce(gradient)
            return
        buckets = list(in_buckets(gradients[::-1], self.bucket_mib * MIB))
        flat = [torch.cat([gradient.flatten() for gradient in bucket]) for bucket in buckets]
        handles = [dist.all_reduce(buffer, async_op=True) for buffer in flat]
        for bucket, buffer, handle in zip(buckets, flat, handles, strict=True):
            assert handle is not None
            handle.wait()
            for gradient, averaged in zip(bucket, buffer.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(averaged.view_as(gradient))


def in_buckets(tensors: list[torch.Tensor], limit: float) -> Iterator[list[torch.Tensor]]:
    """Yield tensors in groups, each of which is complete as soon as it has `limit` bytes."""
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        bucket.append(tensor)
        if sum(t.nbytes for t in bucket) >= limit:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


class BucketedDDP(PlainDDP):
    """DDP with buckets of any size, also below 1 MiB."""

    def __init__(self, settings: Settings, plan: BatchPlan, world: World, *, bucket_mib: float) -> None:
        super().__init__(settings, plan, world)
        self.bucket_cap_mb = bucket_mib


def ladder_variants(settings: Settings) -> dict[str, Variant]:
    """Return the variants, the first of which exchanges nothing."""
    settings = replace(plain_ddp(settings), logical_ranks=None, ddp_bucket_cap_mb=None)
    after = {NO_EXCHANGE: None} | AFTER_BACKWARD
    variants = {
        name: Variant(settings, partial(ExchangeAfterBackward, bucket_mib=size)) for name, size in after.items()
    }
    variants["DDP, default"] = Variant(settings, PlainDDP)
    return variants | {name: Variant(settings, partial(BucketedDDP, bucket_mib=size)) for name, size in BUCKETS.items()}


def measure_ladder(settings: Settings, data: ReviewData, seconds: float, *, world: World) -> Section:
    """Time each variant for about `seconds`, and compare their losses. Collective."""
    with raise_on_all_ranks(world):
        variants = ladder_variants(settings)
    comparisons = [compare(model, variants, data, seconds=seconds, world=world) for model in models(settings.model)]
    differences = {c.model: loss_differences(c, world) for c in comparisons}
    extra = {
        model: ("losses differ by", {name: describe(largest) for name, largest in by_name.items()})
        for model, by_name in differences.items()
    }
    about = [ABOUT, *(summarize(comparison) for comparison in comparisons)]
    section = comparison_section(
        "ladder", (TITLE, about), comparisons, unit="step", extra_columns=extra, draw=world.is_main_process
    )
    numbers = {model: {**values, "loss_differences": differences[model]} for model, values in section.data.items()}
    return replace(section, data=numbers)


def loss_differences(comparison: Comparison, world: World) -> dict[str, float]:
    """Return by how much the losses of each variant, on any rank, differ from those of DDP. Collective."""
    reference = comparison.losses["DDP, default"]
    own = {
        name: max(abs(a - b) for a, b in zip(losses, reference, strict=True))
        for name, losses in comparison.losses.items()
    }
    ranks = all_gather_object(own, world)
    return {name: max(differences[name] for differences in ranks) for name in own}


def describe(difference: float) -> str:
    return f"{difference:.1e}" if difference else "0"


def summarize(comparison: Comparison) -> str:
    """Return a sentence about the worst and the best variant with an exchange."""
    medians = {name: comparison.median(name) for name in comparison.seconds if name != NO_EXCHANGE}
    best = min((name for name in medians if name.startswith("DDP")), key=medians.__getitem__)
    return (
        f"{comparison.model}: an all-reduce per parameter after the backward pass takes "
        f"{medians[PER_PARAMETER] / medians[best]:.2f} times as long as the fastest, {best}."
    )
