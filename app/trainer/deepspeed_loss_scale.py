"""The loss scale of DeepSpeed's `fp16` section, with weights in fp32 and autocast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..strategies.optimization import GROWTH_INTERVAL, LossScale

DYNAMIC = 0  # the value of `loss_scale` that stands for a scale that adapts


class DeepSpeedLossScale(LossScale):
    """A loss scale that DeepSpeed's engine applies, and that changes by DeepSpeed's rules.

    In a step whose gradients overflow, the engine skips the update. After `hysteresis` of them the scale is halved, and
    after `loss_scale_window` steps in a row without one, it is doubled.
    """

    def __init__(self, engine: Any, fp16: Mapping[str, Any]) -> None:
        """`fp16` is the completed section of the configuration."""
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

        self.zero = engine.optimizer
        # With autocast in fp16, ZeRO creates a GradScaler. It divides gradients by the scale only after they have been
        # clipped, by the norm of the scaled ones.
        self.zero.torch_autocast_gradscaler = None
        self.is_dynamic = fp16["loss_scale"] == DYNAMIC
        self.scaler: Any = LossScaler(fp16["loss_scale"])
        if self.is_dynamic:
            self.scaler = DynamicLossScaler(
                init_scale=2.0 ** fp16["initial_scale_power"],
                scale_window=fp16["loss_scale_window"],
                min_scale=fp16["min_loss_scale"],
                delayed_shift=fp16["hysteresis"],
                consecutive_hysteresis=fp16["consecutive_hysteresis"],
                raise_error_at_min_scale=False,  # the record ends a run whose steps are all skipped
            )
        self._apply()

    def _apply(self) -> None:
        """Let the engine multiply the loss by the scale, and divide gradients and their norm by it."""
        # Not the scaler itself: the engine would change the scale between a step's backward pass and its division.
        self.zero.loss_scaler.cur_scale = self.scaler.cur_scale
        self.value = torch.tensor(self.scaler.cur_scale)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss  # the engine scales it

    def update(self, grad_norm: torch.Tensor) -> None:
        self.scaler.update_scale(not bool(torch.isfinite(grad_norm)))
        self._apply()
        # Otherwise Trainer would not advance the schedule. It advances in skipped steps, as with any strategy.
        self.zero.overflow = False

    def state_dict(self) -> dict[str, Any]:
        """Return what `LossScale` can load too, and what only this class needs."""
        state: dict[str, Any] = {"value": float(self.scaler.cur_scale), "good_steps": 0}
        if self.is_dynamic:
            steps = self.scaler.cur_iter - self.scaler.last_overflow_iter - 1
            state["good_steps"] = steps % GROWTH_INTERVAL
            state |= {"steps_since_overflow": steps, "hysteresis": self.scaler.cur_hysteresis}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.is_dynamic:
            self.scaler.cur_scale = state["value"]
            self.scaler.cur_iter = state.get("steps_since_overflow", state["good_steps"])
            self.scaler.last_overflow_iter = -1
            self.scaler.cur_hysteresis = state.get("hysteresis", self.scaler.delayed_shift)
        self._apply()
