"""Choose the strategy that `--strategy` selects."""

from __future__ import annotations

from ..data.sampler import BatchPlan
from ..distributed.world import World
from ..settings import Settings
from .base import Strategy
from .ddp import DDPStrategy, Zero1Strategy
from .fsdp import FullyShardStrategy


def select_strategy(settings: Settings, plan: BatchPlan, world: World) -> Strategy:
    """Return the strategy of a run."""
    if settings.strategy in ("zero2", "zero3"):
        return FullyShardStrategy(settings, plan, world)
    return Zero1Strategy(settings, plan, world) if settings.strategy == "zero1" else DDPStrategy(settings, plan, world)
