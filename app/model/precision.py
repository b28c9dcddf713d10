"""The dtype of weights, and automatic mixed precision: the same in both training paths."""

from __future__ import annotations

import torch

from ..common.machine import DTYPES


def training_dtype(precision: str) -> torch.dtype:
    """Return the dtype of weights and buffers."""
    return torch.float64 if precision == "fp64" else torch.float32


def mixed_precision(precision: str, device: torch.device) -> torch.autocast:
    """Return the context of a forward pass. With bf16 or fp16, it multiplies matrices in it; weights stay in fp32."""
    enabled = precision in ("bf16", "fp16")
    return torch.autocast(device.type, dtype=DTYPES[precision] if enabled else torch.bfloat16, enabled=enabled)
