"""The steps of a run that are not written yet: measured without waiting for the device, and reduced per interval."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.profiler import record_function

from ..common.errors import RunError
from ..data.sampler import BatchPlan
from ..distributed.world import World
from ..settings import Settings
from .steps import Step, Totals, count_tokens, nonfinite_error, reduce_steps

START_CLOCK = "start_clock"  # a range in a trace of torch.profiler, for app/profiling/breakdown.py


class StepLog:
    """The measurements of this rank's steps. Every rank holds one.

    Attributes:
        last_step: the last step that has been done.
        last_loss: the loss of the last step that has been reduced.
        totals: sums over all steps that have been reduced.
    """

    def __init__(
        self,
        settings: Settings,
        world: World,
        *,
        rows_of_step: Callable[[int], Sequence[int]],
        totals: Totals,
        step: int,
    ) -> None:
        """
        Args:
            rows_of_step: returns this rank's data rows of an optimizer step, counted from 1.
            step: the last step before this process was started.
        """
        self.settings, self.world, self.rows_of_step, self.totals = settings, world, rows_of_step, totals
        self.pending: list[Step] = []
        self.last_step, self.last_loss = step, float("nan")

    def start_clock(self) -> None:
        """Measure training time from now on. Call it after anything that is not training, such as an evaluation."""
        with record_function(START_CLOCK):
            self._clock = time.perf_counter()

    def add(
        self,
        step: int,
        losses: torch.Tensor,
        grad_norm: torch.Tensor,
        *,
        learning_rate: float,
        batches: Sequence[Mapping[str, torch.Tensor]],
        plan: BatchPlan,
    ) -> None:
        """Keep the measurements of a step, without waiting for the device. Arguments as for `RunRecord.after_step`."""
        now = time.perf_counter()
        epoch, counts = step / plan.steps_per_epoch, count_tokens(batches)
        self.pending.append(Step(step, epoch, losses, grad_norm, learning_rate, *counts, now - self._clock))
        self.last_step, self._clock = step, now

    def reduce(self) -> tuple[list[dict[str, Any]], RunError | None]:
        """Reduce the pending steps over the ranks, and add them to the totals. Collective.

        Returns:
            Lines of steps.jsonl, and the error to raise if a gradient norm is not finite, other than by an overflow in
            fp16. The lines are then those of the steps before it. The optimizer skipped that step (see
            `skip_step_if_nonfinite`); the steps after it are discarded.
        """
        lines = reduce_steps(self.pending, self.world)
        self.last_loss = lines[-1]["loss"]
        failed = self.totals.add_all(lines, self.settings.precision)
        pending, self.pending = self.pending, []
        if failed is None:
            return lines, None
        step = pending[failed]
        self.last_step = step.step - 1
        rows, skipped = self.rows_of_step(step.step), self.totals.skipped_in_a_row
        return lines[:failed], nonfinite_error(
            step, rows, skipped_in_a_row=skipped, world=self.world, comm_hook=self.settings.ddp_comm_hook
        )
