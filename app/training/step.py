"""Parts of a training step, the same in both training paths: parameter groups, AdamW, learning rate schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from ..model.load import is_pretrained
from ..settings import Settings
from ..strategies.base import Strategy
from ..strategies.optimization import VectorTails

FROM_PRETRAINED = 2e-5  # Devlin et al. 2019, appendix A.3: 2e-5 to 5e-5
FROM_SCRATCH = 1e-3  # chosen by experiment for `tiny`


def peak_learning_rate(settings: Settings) -> float:
    """Return `--learning_rate` or, if it is not set, the default of the model."""
    return settings.learning_rate or (FROM_PRETRAINED if is_pretrained(settings.model) else FROM_SCRATCH)


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices and embeddings, with weight decay; biases and other vectors, without."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def build_optimizer(wrapped: torch.nn.Module, settings: Settings, *, strategy: Strategy) -> torch.optim.Optimizer:
    """Build fused AdamW (Loshchilov and Hutter 2019), with the same results however parameters are sharded."""
    optimizer = strategy.build_optimizer(
        parameter_groups(wrapped, settings.weight_decay),
        lr=peak_learning_rate(settings),
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        fused=True,
    )
    VectorTails(strategy.local_optimizer(optimizer))  # registers itself
    return optimizer


def warmup_steps(requested: float, total_steps: int) -> int:
    """Return the number of warmup steps. A request below 1 is a fraction of all steps, as in `TrainingArguments`."""
    return math.ceil(requested * total_steps) if requested < 1 else int(requested)


def build_scheduler(optimizer: torch.optim.Optimizer, settings: Settings, total_steps: int) -> LRScheduler:
    """Build the learning rate schedule, per optimizer step: linear warmup, then the one of `lr_scheduler_type`."""
    scheduler: LRScheduler = get_scheduler(
        settings.lr_scheduler_type,
        optimizer,
        num_warmup_steps=warmup_steps(settings.warmup_steps, total_steps),
        num_training_steps=total_steps,
    )
    return scheduler


def skip_step_if_nonfinite(optimizer: torch.optim.Optimizer, grad_norm: torch.Tensor) -> None:
    """Make the optimizer's next step change nothing if the gradient norm is not finite.

    The fused optimizers read `found_inf` on the device, as they do for `torch.amp.GradScaler`, so the host does
    not wait for the norm. It is equal on every rank, so all ranks skip the same step. At the end of the logging
    interval, `RunRecord.write_steps` reads the norm, and stops the run unless it is an overflow in fp16.
    """
    found_inf = torch.isfinite(grad_norm).logical_not().float()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if parameters:  # with ZeRO-1, a rank may have none
        # With --cpu_offload the optimizer runs on the CPU: it would read its own copy before the transfer has finished.
        found_inf = found_inf.to(parameters[0].device)
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
