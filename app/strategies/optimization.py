"""The objects that update the weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import LRScheduler

from .loss_scale import LossScale


@dataclass(frozen=True)
class Optimization:
    """The optimizer, its schedule, and the scale of the loss in fp16."""

    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    loss_scale: LossScale
