"""The record of a run in progress: it writes the run's folder, the same files in both training paths.

Only rank 0 writes. Every file except the two logs is written to a staging file and renamed, so a file that exists is
complete.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.profiler import record_function
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from app.checkpoint.best import Best, load_best, remove_unused_best, save_best
from app.checkpoint.manager import PREFIX, CheckpointManager, step_of
from app.data.sampler import BatchPlan
from app.distributed.collectives import all_gather_object
from app.errors import Preempted, RunError
from app.files import flush, write_json
from app.hardware import peak_memory_bytes
from app.metrics.score import Scores
from app.runs import schema
from app.runs.artifacts import write_results
from app.runs.contents import RunInfo, run_state_content
from app.runs.metrics_log import MetricsLog
from app.runs.reset import FolderReset
from app.runs.resume import Resume
from app.runs.steps import Step, Totals, console_line, count_tokens, nonfinite_error, reduce_steps
from app.strategies.base import Strategy
from app.strategies.fsdp import wrapper_name

START_CLOCK = "start_clock"  # a range in a trace of torch.profiler, for app/training/step_breakdown.py


class RunRecord:
    """The files of one run. `open_run` creates it.

    Every rank holds one and calls the same methods in the same order, because most of them are collective.
    """

    def __init__(
        self,
        info: RunInfo,
        resume: Resume,
        rows_of_step: Callable[[int], Sequence[int]],
        folder: Path,
        lock: int | None,
    ) -> None:
        """
        Args:
            rows_of_step: returns this rank's data rows of an optimizer step, counted from 1.
            folder: the run's folder, which exists.
            lock: on rank 0, the descriptor that keeps other jobs out of the folder until the run has finished.
        """
        self.info, self.settings, self.world = info, info.settings, info.world
        self.resume, self.rows_of_step, self.folder, self.lock = resume, rows_of_step, folder, lock
        self.model_folder = folder / schema.MODEL_FOLDER
        self.checkpoints = CheckpointManager(
            folder / schema.CHECKPOINTS, self.settings.save_total_limit, self.settings.on_save_failure, self.world
        )
        self.checkpoints.latest_valid = resume.checkpoint
        self.logs = {name: MetricsLog(folder / name) for name in schema.LOGS}
        self.pending: list[Step] = []
        self.totals = Totals(**resume.state.get("totals", {}))
        self.best = Best(**resume.state.get("best", {}))
        self.step = resume.step  # the last step, for error messages
        self.last_loss = float("nan")
        self.results_hash: str | None = None  # known on rank 0 once the run has finished
        self.reset = FolderReset(folder, info, resume)

    # ---- start and end of a run -------------------------------------------------------------------------------------

    def begin(self, plan: BatchPlan, wrapped: torch.nn.Module) -> bool:
        """Start the record, after the training state has been loaded from the checkpoint. Collective.

        Args:
            wrapped: the model as returned by `strategy.wrap`, whose class is recorded.

        Returns:
            Whether the evaluation after the checkpoint's own step has to be repeated. A checkpoint is written before
            the evaluation of the same step, so it never contains the result.

        Raises:
            AgreedError: the folder can't be written.
        """
        self.plan, step = plan, self.resume.step
        evaluate = step > 0 and plan.due(self.settings.eval_strategy, self.settings.eval_steps, step)
        self.reset.begin(wrapper_name(wrapped), step if evaluate else None)
        self.start_clock()
        return evaluate

    def finish(
        self,
        strategy: Strategy,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        logits: NDArray[np.floating[Any]],
        scores: Scores,
    ) -> None:
        """Write the model, predictions.csv and, last, metrics.json, whose existence marks the run as finished.

        Collective.

        Args:
            logits: float (n_test, classes), of the test rows in file order.

        Raises:
            OSError: on rank 0, a file can't be written.
        """
        self.reset.run()  # if the checkpoint was that of the last step
        peak_memory = all_gather_object(peak_memory_bytes(self.world.device), self.world)
        state = strategy.gather_model_state(model)
        if not self.world.is_main_process:
            return
        for log in self.logs.values():
            log.flush()  # a run is finished only if its logs are complete
        self.results_hash = write_results(
            self.folder, self.info, model, state, tokenizer, logits, scores, self.totals, peak_memory
        )
        assert self.lock is not None
        os.close(self.lock)
        self.lock = None

    @contextmanager
    def locate_failures(self) -> Iterator[None]:
        """Add the last step and the latest valid checkpoint to an exception, for its error line."""
        try:
            yield
        except Exception as failure:
            checkpoint = self.checkpoints.find_latest_valid() or "none"
            failure.add_note(f"after step {self.step}; latest valid checkpoint: {checkpoint}")
            raise

    def preempted(self, step: int) -> Exception:
        """Return the exception that ends a run after a stop request."""
        when = f"after step {step} of {self.plan.total_steps}, on request"
        saved = self.checkpoints.latest_valid
        if saved is None or step_of(saved) != step:
            return RunError(f"stopped {when}, but its checkpoint could not be written")
        return Preempted(f"{when}; resume with --resume_from_checkpoint {self.folder}")

    # ---- steps and evaluations --------------------------------------------------------------------------------------

    def start_clock(self) -> None:
        """Measure training time from now on. Call it after anything that is not training, such as an evaluation."""
        with record_function(START_CLOCK):
            self._clock = time.perf_counter()

    def add_step(
        self,
        step: int,
        epoch: float,
        losses: torch.Tensor,
        grad_norm: torch.Tensor,
        learning_rate: float,
        batches: Sequence[Mapping[str, torch.Tensor]],
    ) -> None:
        """Keep the measurements of one optimizer step until `write_steps`, without waiting for the device.

        Args:
            step: the optimizer step, counted from 1.
            losses: the mean loss of each of this rank's micro-batches, shape (micro-batches,).
            grad_norm: the global gradient norm before clipping, scalar.
            batches: this rank's micro-batches of the step.
        """
        now = time.perf_counter()
        examples, tokens, padded_tokens = count_tokens(batches)
        self.step = step
        self.pending.append(
            Step(step, epoch, losses, grad_norm, learning_rate, examples, tokens, padded_tokens, now - self._clock)
        )
        self._clock = now

    def write_steps(self) -> None:
        """Append the pending steps to steps.jsonl, and print the last one if it ends a logging interval. Collective.

        Raises:
            RunError: a gradient norm is not finite, other than by an overflow in fp16. The steps before it are written.
                The optimizer skipped that step (see `skip_step_if_nonfinite`); the steps after it are discarded.
        """
        if not self.pending:
            return
        lines = reduce_steps(self.pending, self.world)
        self.last_loss = lines[-1]["loss"]
        failed = self.totals.add_all(lines, self.settings.precision)
        if failed != 0:  # the first step has succeeded on all ranks
            if not self.reset.is_done:
                self.reset.run()
                self._clock = time.perf_counter()  # removing checkpoints is not training
            self._append(schema.STEPS.name, lines[:failed])
        if failed is not None:
            step = self.pending[failed]
            self.step = step.step - 1
            rows, skipped = self.rows_of_step(step.step), self.totals.skipped_in_a_row
            raise nonfinite_error(step, rows, skipped, self.world, self.settings.ddp_comm_hook)
        self.pending.clear()
        # A checkpoint or an evaluation in the middle of an interval writes the steps too, but prints nothing.
        if self.step % self.settings.logging_steps == 0 or self.step == self.plan.total_steps:
            self._print(console_line(lines, self.plan.total_steps))

    def write_evaluation(self, step: int, epoch: float, rows: str, n: int, metrics: Mapping[str, float]) -> None:
        """Append a line to evaluations.jsonl, and print it.

        Args:
            rows: the name of the eval set, `validation` or `test`.
            n: its number of rows.
            metrics: at least accuracy, f1 and loss.
        """
        line = {"step": step, "epoch": epoch, "rows": rows, "n": n}
        line |= {name: metrics[name] for name in ("accuracy", "f1", "loss")}
        self.reset.write_after(lambda: self._append(schema.EVALUATIONS.name, [line]))
        self._print(f"epoch {epoch:.2f}: {rows} accuracy {metrics['accuracy']:.4f}, loss {metrics['loss']:.4f}")

    def _append(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append to a log. If that fails, `--on_save_failure` decides whether the run continues."""
        if not self.world.is_main_process:
            return
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        if self.settings.on_save_failure == "stop":
            self.logs[name].append(text)
        else:
            self.logs[name].append_or_keep(text, self.world.print_main)

    def _print(self, line: str) -> None:
        if self.world.is_main_process:
            tqdm.write(line)  # above the progress bar, if there is one

    # ---- checkpoints and best weights -------------------------------------------------------------------------------

    def save_checkpoint(self, step: int, fill: Callable[[Path], None]) -> None:
        """Write the checkpoint of a step. Collective.

        Args:
            fill: `fill(staging)`, called on every rank, writes the training state.
        """
        self.write_steps()

        def fill_with_run_state(staging: Path) -> None:
            fill(staging)
            if self.world.is_main_process:
                for log in self.logs.values():  # resuming needs their lines, so they must survive a power failure too
                    log.flush()
                evaluations = self.logs[schema.EVALUATIONS.name].count_lines()
                state = run_state_content(self.info, step, self.plan, self.totals, self.best, evaluations)
                write_json(staging / schema.RUN_STATE, state)
                flush(self.folder)

        saved = self.checkpoints.save(f"{PREFIX}{step}", fill_with_run_state, schema.checkpoint_files(self.world.size))
        if saved and self.world.is_main_process:
            remove_unused_best(self.checkpoints.folder, self.best)
        self.start_clock()

    def keep_best(self, step: int, strategy: Strategy, model: torch.nn.Module, metrics: Mapping[str, float]) -> None:
        """Save the weights if the validation metric is better than after all earlier steps. Collective."""
        metric = self.settings.metric_for_best_model
        if not (self.settings.load_best_model_at_end and self.best.is_improved_by(metrics[metric], metric)):
            return
        before, self.best = self.best, Best(step, metrics[metric])
        state = strategy.gather_model_state(model)
        if not self.reset.is_done:  # the next step changes the weights before they are written
            state = {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}

        def save() -> None:
            self.best = save_best(self.checkpoints, before, self.best, state)

        self.reset.write_after(save)

    def load_best(self, model: torch.nn.Module) -> None:
        """Load the best weights into the model, if that is requested and there are any. Collective.

        Raises:
            RunError: the weights are damaged.
        """
        if not self.settings.load_best_model_at_end or not self.best.step:
            return
        if self.reset.is_done or self.best.step != self.step:  # otherwise these are the model's weights, not saved yet
            load_best(self.checkpoints.folder, self.best, model, self.world)
        metric = f"validation {self.settings.metric_for_best_model} {self.best.value:.4f}"
        self.world.print_main(f"{'best weights':>14}  of step {self.best.step}: {metric}")
