"""Stop a run whose loss or gradients are not finite, without waiting for the device in every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from app.distributed.collectives import all_gather_object
from app.distributed.world import World
from app.errors import RunError


def skip_step_if_nonfinite(optimizer: torch.optim.Optimizer, grad_norm: torch.Tensor) -> None:
    """Let the optimizer's next step change nothing if the gradient norm is not finite.

    The fused optimizers read `found_inf` on the device, as they do for `torch.amp.GradScaler`, so the host does not
    wait for the norm. It is equal on every rank, so all ranks skip the same step. `RunRecord.write_steps` reads the
    norm at the end of the logging interval and stops the run.

    Args:
        optimizer: a fused optimizer.
        grad_norm: scalar, the norm of the gradients averaged over the ranks.
    """
    optimizer.found_inf = torch.isfinite(grad_norm).logical_not().float()  # type: ignore[attr-defined]


def nonfinite_error(
    step: int, loss: torch.Tensor, grad_norm: torch.Tensor, rows: Sequence[int], world: World
) -> RunError:
    """Describe a step whose gradient norm is not finite. Collective.

    Args:
        step: the optimizer step, counted from 1.
        loss: this rank's loss of that step, scalar.
        grad_norm: the norm of the averaged gradients, scalar.
        rows: this rank's data rows of that step.
        world: this rank's.

    Returns:
        The error to raise. It names the ranks whose loss is not finite, and their rows.
    """
    reports = all_gather_object((bool(torch.isfinite(loss)), ", ".join(map(str, rows))), world)
    ranks = [f"rank {rank}, rows {its_rows}" for rank, (finite, its_rows) in enumerate(reports) if not finite]
    cause = f"the loss is not finite on {' and '.join(ranks)}" if ranks else f"the gradients are {float(grad_norm)}"
    return RunError(f"step {step}: {cause}; the optimizer has not made this step")
