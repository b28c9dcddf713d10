"""Choose the strategy that `--strategy` selects."""

from __future__ import annotations

from ..data.sampler import BatchPlan
from ..distributed.world import World
from ..settings import Settings
from .base import Strategy
from .ddp import DDP, Zero1
from .fsdp import FullyShard


def select_strategy(settings: Settings, plan: BatchPlan, world: World) -> Strategy:
    """Return the strategy of a run."""
    if settings.strategy in ("zero2", "zero3"):
        return FullyShard(settings, plan, world)
    return Zero1(settings, plan, world) if settings.strategy == "zero1" else DDP(settings, plan, world)
