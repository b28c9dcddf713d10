"""Automatic mixed precision: the same in both training paths."""

from __future__ import annotations

import torch

from app.distributed.world import World
from app.hardware import autocast
from app.settings import Settings


def mixed_precision(settings: Settings, world: World) -> torch.autocast:
    """Return the context of a forward pass in the precision of the settings."""
    return autocast(settings.precision or "fp32", world.device)
