"""The steps of a run: measured on each rank without waiting for the device, reduced per interval, and logged."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import record_function

from ..common.errors import RunError
from ..common.files import flush
from ..distributed.collectives import all_gather_object, wait_for_device
from ..distributed.world import World
from ..strategies.base import START_CLOCK
from ..training.prepare import Preparation

# With fp16, the loss scale of 2**16 has been halved to 2**-8 after so many overflows in a row: it is not the cause.
MAX_SKIPPED = 24
COUNTS = ("examples", "tokens", "padded_tokens")


class Step(NamedTuple):
    """One optimizer step on this rank. Tensors stay on the device until the whole logging interval is reduced."""

    line: dict[str, Any]  # of steps.jsonl, with this rank's counts, and None for the loss and the norm
    losses: torch.Tensor  # the mean loss of each of this rank's micro-batches, shape (micro-batches,)
    grad_norm: torch.Tensor  # of the averaged gradients before clipping, scalar, equal on every rank


class StepLog:
    """The measurements of this rank's steps. Every rank holds one."""

    def __init__(self, run: Preparation, lines: Sequence[str]) -> None:
        """`lines` are those of steps.jsonl before this process was started."""
        self.run, self.world = run, run.world
        self.pending: list[Step] = []
        self.last_step = run.resume.step  # the last step that has been done
        # How many steps have been skipped because of an overflow in fp16 since the last one that was not.
        overflows = (json.loads(line)["grad_norm"] is None for line in reversed(lines))
        self.skipped_in_a_row = sum(takewhile(bool, overflows))

    def start_clock(self) -> None:
        """Measure training time from now on. Call it after anything that is not training, such as an evaluation."""
        with record_function(START_CLOCK):
            self._clock = time.perf_counter()

    def add(self, step: Step) -> None:
        """Keep the measurements of a step until they are reduced, and measure its time."""
        now = time.perf_counter()
        step.line["seconds"], self._clock = now - self._clock, now
        self.pending.append(step)
        self.last_step = step.line["step"]

    def reduce(self) -> tuple[list[dict[str, Any]], RunError | None]:
        """Reduce the pending steps over the ranks. Collective.

        Returns:
            Lines of steps.jsonl, and the error to raise if a loss or a gradient norm is not finite, other than by an
            overflow in fp16. Then the lines end before that step. If its gradient norm is not finite, the optimizer
            skipped it (see `skip_step_if_nonfinite`).
        """
        pending, self.pending = self.pending, []
        lines = reduce_steps(pending, self.world)
        for i, line in enumerate(lines):
            if math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]):
                self.skipped_in_a_row = 0
                continue
            is_overflow = self.run.settings.precision == "fp16" and math.isfinite(line["loss"])
            if not is_overflow or self.skipped_in_a_row == MAX_SKIPPED:
                self.last_step = line["step"] - 1
                return lines[:i], self.nonfinite_error(pending[i])
            line["grad_norm"] = None  # the loss scale was too large, and has been halved
            self.skipped_in_a_row += 1
        return lines, None

    def nonfinite_error(self, step: Step) -> RunError:
        """Return the error for a step that is not finite. Collective.

        It names the ranks whose loss is not finite, and their rows.
        """
        run, number = self.run, step.line["step"]
        rows = ", ".join(map(str, run.data.rows_of_step(run.strategy.logical_ranks, run.settings, number)))
        reports = all_gather_object((bool(torch.isfinite(step.losses).all()), rows), self.world)
        ranks = [f"rank {rank}, rows {its_rows}" for rank, (finite, its_rows) in enumerate(reports) if not finite]
        cause = f"the gradient norm is {float(step.grad_norm)}"
        if ranks:
            cause = f"the loss is not finite on {' and '.join(ranks)}"
        elif self.skipped_in_a_row:
            return RunError(
                f"step {number}: the gradients overflowed in fp16 in {self.skipped_in_a_row + 1} steps in a "
                "row, although each of them halved the loss scale: lower --learning_rate, or use --precision bf16 or "
                "fp32"
            )
        elif torch.isfinite(step.grad_norm):
            cause = "the mean of the losses of all ranks is not finite"
        elif run.settings.ddp_comm_hook == "fp16":
            cause += " (--ddp_comm_hook fp16 rounds a gradient above 65504 to infinity; bf16 does not)"
        skipped = "" if torch.isfinite(step.grad_norm) else "; the optimizer skipped this step"
        return RunError(f"step {number}: {cause}{skipped}")


def count_tokens(batches: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, int]:
    """Return the counts of some batches on the CPU: rows, tokens, and tokens with padding."""
    # A model that takes no mask reads padding as text, so all positions count as tokens.
    masks = [batch.get("attention_mask", torch.ones_like(batch["input_ids"])) for batch in batches]
    return {
        "examples": sum(len(mask) for mask in masks),
        "tokens": sum(int(mask.sum()) for mask in masks),
        "padded_tokens": sum(mask.numel() for mask in masks),
    }


def reduce_steps(steps: Sequence[Step], world: World) -> list[dict[str, Any]]:
    """Reduce any number of steps over the ranks in one collective. Collective.

    Returns:
        A line of steps.jsonl for each step. Losses and norms may be infinite or NaN.
    """
    counts = torch.tensor([[step.line[name] for name in COUNTS] for step in steps], dtype=torch.float64)  # exact
    norms = torch.stack([step.grad_norm.double() for step in steps])  # equal on every rank
    losses = torch.stack([step.losses.double() for step in steps])
    wait_for_device(world)  # only here does the host wait for the device: once for all steps of the interval
    measured = torch.cat([counts, losses.cpu()], dim=1)
    by_rank = [torch.empty_like(measured) for _ in range(world.size)]
    dist.all_gather(by_rank, measured, group=world.control_group)
    sums = torch.stack(by_rank)[:, :, : len(COUNTS)].sum(dim=0).long()
    by_step = torch.cat([part[:, len(COUNTS) :] for part in by_rank], dim=1).tolist()  # losses
    return [
        step.line | {"loss": loss, "grad_norm": norm} | dict(zip(COUNTS, totals, strict=True))
        for step, loss, norm, totals in zip(steps, map(mean, by_step), norms.tolist(), sums.tolist(), strict=True)
    ]


def mean(values: Sequence[float]) -> float:
    """Return the mean, rounded once, so that it does not depend on the order. NaN and infinity are returned as such."""
    try:
        return math.fsum(values) / len(values)
    except (OverflowError, ValueError):  # infinities of both signs
        return math.nan


def console_line(lines: Sequence[Mapping[str, Any]], total_steps: int) -> str:
    """Describe the last of these lines of steps.jsonl. The speed is the mean over all of them."""
    last = lines[-1]
    examples_per_second = sum(line["examples"] for line in lines) / sum(line["seconds"] for line in lines)
    norm = "overflow (step skipped)" if last["grad_norm"] is None else f"{last['grad_norm']:.3g}"
    return (
        f"step {last['step']}/{total_steps} (epoch {last['epoch']:.2f}): loss {last['loss']:.4f}, "
        f"grad norm {norm}, learning rate {last['learning_rate']:.3g}, "
        f"{examples_per_second:.0f} rows/s"
    )


class MetricsLog:
    """An append-only log. Lines that could not be written, such as on a full disk, are written with the next ones."""

    def __init__(self, path: Path, kept: Sequence[str] = ()) -> None:
        """`kept` are the lines up to the checkpoint. Others are removed when the first new line is appended."""
        self.path, self.pending = path, b""
        self.size = len("".join(kept).encode())  # bytes that are known to be complete lines

    def append(self, lines: Sequence[str]) -> None:
        """Append complete lines; without any, write only those that are pending.

        Raises:
            OSError: the lines could not be written; they remain pending.
        """
        self.pending += "".join(lines).encode()
        with self.path.open("ab") as file:
            file.truncate(self.size)  # removes what a killed run, or a write that failed, has left
            file.write(self.pending)
        self.size, self.pending = self.size + len(self.pending), b""

    def flush(self) -> None:
        """Write all pending lines, and flush the file to disk.

        Raises:
            OSError: the lines could not be written or flushed.
        """
        if self.pending or self.path.exists():
            self.append(())
            flush(self.path)
