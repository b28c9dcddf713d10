"""Skip a step whose gradients are not finite, without waiting for the device."""

from __future__ import annotations

import torch


def skip_step_if_nonfinite(optimizer: torch.optim.Optimizer, grad_norm: torch.Tensor) -> None:
    """Make the optimizer's next step change nothing if the gradient norm is not finite.

    The fused optimizers read `found_inf` on the device, as they do for `torch.amp.GradScaler`, so the host does
    not wait for the norm. It is equal on every rank, so all ranks skip the same step. At the end of the logging
    interval, `RunRecord.write_steps` reads the norm, and stops the run unless it is an overflow in fp16.

    Args:
        optimizer: a fused optimizer.
        grad_norm: scalar tensor, the norm of the gradients averaged over the ranks.
    """
    found_inf = torch.isfinite(grad_norm).logical_not().float()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if parameters:  # with ZeRO-1, a rank may have none
        # With --cpu_offload the optimizer runs on the CPU. It would not wait for the copy that it makes itself.
        found_inf = found_inf.to(parameters[0].device)
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
