"""The dtypes of training: those of weights, and automatic mixed precision. The same in both training paths."""

from __future__ import annotations

import torch

from app.distributed.world import World
from app.hardware import DTYPES
from app.settings import Settings


def training_dtype(settings: Settings) -> torch.dtype:
    """Return the dtype of weights and buffers."""
    return torch.float64 if settings.precision == "fp64" else torch.float32


def mixed_precision(settings: Settings, world: World) -> torch.autocast:
    """Return the context of a forward pass in the precision of the settings."""
    return autocast(settings.precision or "fp32", world.device)


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return the context of a forward pass. With bf16 or fp16, it multiplies matrices in it; weights stay in fp32."""
    enabled = precision in ("bf16", "fp16")
    return torch.autocast(device.type, dtype=DTYPES[precision] if enabled else torch.bfloat16, enabled=enabled)
