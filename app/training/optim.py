"""Parameter groups, AdamW and schedule: the same for both roads."""

from __future__ import annotations

import math

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from app.settings import Settings

FROM_PRETRAINED = 2e-5  # Devlin et al. 2019, appendix A.3: 2e-5 to 5e-5
FROM_SCRATCH = 1e-3  # measured on the embedded model


def default_learning_rate(pretrained: bool) -> float:
    return FROM_PRETRAINED if pretrained else FROM_SCRATCH


def build_optimizer(model: torch.nn.Module, settings: Settings, learning_rate: float) -> torch.optim.AdamW:
    """Fused AdamW (Loshchilov and Hutter 2019). Matrices and embeddings decay; biases and norms, being vectors,
    don't."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        fused=True,
    )


def warmup_steps(settings: Settings, total_steps: int) -> int:
    """Steps of warm-up: a value below 1 is a share of all steps, as in `TrainingArguments`."""
    steps = settings.warmup_steps
    return math.ceil(steps * total_steps) if steps < 1 else int(steps)


def build_scheduler(optimizer: torch.optim.Optimizer, settings: Settings, total_steps: int) -> LRScheduler:
    """Linear warm-up, then the course that `lr_scheduler_type` names. To be stepped once an optimizer step."""
    scheduler: LRScheduler = get_scheduler(
        settings.lr_scheduler_type,
        optimizer,
        num_warmup_steps=warmup_steps(settings, total_steps),
        num_training_steps=total_steps,
    )
    return scheduler
