"""Automatic mixed precision: the same in both training paths."""

from __future__ import annotations

import torch

from app.distributed.world import World
from app.settings import Settings

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def mixed_precision(settings: Settings, world: World) -> torch.autocast:
    """Return the context of a forward pass. With bf16 or fp16, it multiplies matrices in it; weights stay in fp32."""
    dtype = AUTOCAST.get(settings.precision or "fp32")
    return torch.autocast(world.device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)
