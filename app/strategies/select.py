"""Choose the strategy that `--strategy`, `--deepspeed` or `--fsdp` selects."""

from __future__ import annotations

from app.data.sampler import BatchPlan
from app.distributed.world import World
from app.settings import Settings
from app.strategies.base import Strategy
from app.strategies.ddp import DDP, Zero1
from app.strategies.deepspeed_engine import DeepSpeed
from app.strategies.fsdp import FullyShard
from app.strategies.trainer_fsdp import TrainerFSDP


def select_strategy(settings: Settings, plan: BatchPlan, world: World) -> Strategy:
    """Return the strategy of a run."""
    if settings.deepspeed is not None:
        return DeepSpeed(settings, plan, world)
    if settings.fsdp:
        return TrainerFSDP(settings, plan, world)
    if settings.strategy in ("zero2", "zero3"):
        return FullyShard(settings, plan, world)
    return Zero1(settings, plan, world) if settings.strategy == "zero1" else DDP(settings, plan, world)
