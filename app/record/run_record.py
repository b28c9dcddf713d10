"""The record of a run in progress: it writes the run's folder, the same files in both training paths.

Rank 0 writes all files except each rank's part of a checkpoint. Except for the two logs, a file or folder gets its name
when it is complete. The logs are the only memory of a run: totals, the best weights and early stopping follow from
their lines, so a checkpoint holds the training state and its step alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from ..checkpoint.manager import PREFIX, CheckpointManager, latest_first, step_of
from ..checkpoint.state import TrainingState
from ..common.errors import Preempted, RunError, UserError
from ..common.files import flush
from ..common.machine import peak_memory_bytes
from ..common.terminal import hides_progress
from ..distributed.collectives import all_gather_object, raise_on_all_ranks, stop_or_warn
from ..distributed.preemption import StopRequest
from ..jobs import BLOCKS
from ..metrics.early_stopping import EarlyStopping
from ..metrics.score import Scores
from ..model.vocabulary import complete_state, trimmed_vocabulary
from ..runs.schema import CHECKPOINTS, EVALUATIONS, LOGS, METRICS, STEPS, TENSORS
from ..strategies.fsdp import wrapper_name
from ..tracing import TracedStrategy
from ..training.prepare import Preparation
from .best import BestWeights
from .results import describe_result, write_results
from .run_folder import run_state_content, write_description
from .steps import MetricsLog, Step, StepLog, console_line, count_tokens
from .trackers import Trackers

if TYPE_CHECKING:
    from ..profiling.profiler import StepProfiler


class RunRecord:
    """The files of one run. Most methods are collective: every rank calls them in the same order."""

    def __init__(self, run: Preparation) -> None:
        self.run, self.folder, self.resume, self.plan = run, run.folder, run.resume, run.data.plan
        self.settings, self.world = run.settings, run.world
        self.vocabulary = trimmed_vocabulary(run.model)
        self.checkpoints = CheckpointManager(
            run.folder / CHECKPOINTS, run.settings.save_total_limit, run.settings.on_save_failure, world=run.world
        )
        self.checkpoints.latest_valid = run.resume.checkpoint
        lines = {log.name: run.resume.lines_of(log.name) for log in LOGS}
        self.logs = {name: MetricsLog(run.folder / name, kept) for name, kept in lines.items()}
        self.steps = StepLog(run, lines[STEPS.name])
        self.best = BestWeights(self.checkpoints, run.settings, list(map(json.loads, lines[EVALUATIONS.name])))
        self.early_stopping = EarlyStopping(run.settings)
        for line in self.best.evaluations:
            self.early_stopping.add(line)
        self.trackers = Trackers(run)
        self.bar = tqdm(disable=True)  # until `begin`
        self.traced = run.strategy if isinstance(run.strategy, TracedStrategy) else None
        self.profiler: StepProfiler | None = None
        if run.settings.profile:
            from ..profiling.profiler import StepProfiler  # here, because other runs do not need it

            self.profiler = StepProfiler(
                run.settings, run.world, run.folder, step=run.resume.step, total_steps=self.plan.total_steps
            )

    # ---- start and end of a run -------------------------------------------------------------------------------------

    def begin(self, state: TrainingState, wrapped: torch.nn.Module, stop: StopRequest) -> bool:
        """Start the record, after the training state has been loaded from the checkpoint. Collective.

        Args:
            wrapped: the model as returned by `strategy.wrap`, whose class is recorded.

        Returns:
            Whether the evaluation after the checkpoint's own step is missing. A checkpoint is written before it.

        Raises:
            AgreedError: the folder cannot be written.
        """
        self.state, self.stop, plan, step = state, stop, self.plan, self.resume.step
        with raise_on_all_ranks(self.world):
            if self.world.is_main_process:
                try:
                    if (checkpoint := self.resume.checkpoint) is not None:
                        self.best.check(checkpoint)
                    write_description(self.run, wrapper_name(wrapped))
                    if checkpoint is not None:  # last: if it is interrupted, the folder is known to be this run's
                        self.best.take_over(checkpoint)
                except OSError as problem:
                    raise UserError(f"{self.folder}: cannot be written: {problem.strerror or problem}") from None
        hidden = hides_progress(self.settings.disable_tqdm, self.world.is_main_process)
        self.bar = tqdm(total=plan.total_steps, initial=step, unit=" steps", disable=hidden)
        self.trackers.start()
        self.steps.start_clock()
        is_evaluated = step in [line["step"] for line in self.best.evaluations]
        return step > 0 and plan.due(self.settings.eval_strategy, self.settings.eval_steps, step) and not is_evaluated

    def finish(self, logits: NDArray[np.floating[Any]], scores: Scores) -> None:
        """Write the model, predictions.csv and, last, metrics.json, which marks the run as finished. Collective.

        Args:
            logits: float (n_test, classes), of the test rows in file order.

        Raises:
            OSError: on rank 0, a file cannot be written.
        """
        run = self.run
        memory = all_gather_object(peak_memory_bytes(self.world.device), self.world)
        state = run.strategy.gather_model_state(run.model)
        if not self.world.is_main_process:
            return
        for log in self.logs.values():
            log.flush()  # a run is finished only if its logs are complete
        metrics = write_results(run, complete_state(run.model, state), logits=logits, scores=scores, peak_memory=memory)
        self.trackers.log(METRICS.name, [metrics | {"step": self.plan.total_steps}])
        if BLOCKS not in os.environ:
            self.world.print_main(describe_result(run, scores, metrics))

    @contextmanager
    def locate_failures(self) -> Iterator[None]:
        """Add the last step and the latest checkpoint to an exception, for its error line."""
        try:
            with self.profiler or nullcontext():
                yield
        except Exception as failure:
            # Rank 0 may have named one right before it failed. Those of later steps were skipped because of damage.
            named = (c for c in latest_first(self.checkpoints.folder) if step_of(c) <= self.steps.last_step)
            checkpoint = next(named, self.checkpoints.latest_valid or "none")
            failure.add_note(f"after step {self.steps.last_step}; latest valid checkpoint: {checkpoint}")
            raise
        finally:
            self.bar.close()  # otherwise the line of a failure would follow it
            self.trackers.close()

    # ---- steps and evaluations --------------------------------------------------------------------------------------

    def after_step(
        self,
        step: int,
        losses: torch.Tensor,
        grad_norm: torch.Tensor,
        *,
        learning_rate: float,
        batches: Sequence[Mapping[str, torch.Tensor]],
    ) -> bool:
        """Record an optimizer step; log, save a checkpoint and stop if that is due. Collective.

        Args:
            losses: like the norm, as in `Step`. The host does not wait for them.
            batches: this rank's micro-batches of the step, on the CPU.

        Returns:
            Whether an evaluation is due.

        Raises:
            Preempted: a rank was asked to stop, and a checkpoint has been saved.
            RunError: as `write_steps`; or the run stops, and its checkpoint could not be written.
        """
        settings, plan = self.settings, self.plan
        if self.traced is not None and (tensors := self.traced.end_step(self.state.optimization.optimizer)):
            self._append(TENSORS.name, tensors)  # in the time of this step
        line = {"step": step, "epoch": step / plan.steps_per_epoch, "loss": None, "grad_norm": None}
        line |= {"learning_rate": learning_rate, **count_tokens(batches)}
        self.steps.add(Step(line, losses, grad_norm))
        evaluation_is_due = plan.due(settings.eval_strategy, settings.eval_steps, step)
        if step % settings.logging_steps == 0 or step == plan.total_steps or evaluation_is_due:
            self.write_steps()
        self.bar.update()
        if self.profiler is not None and self.profiler.step():
            self.steps.start_clock()  # writing is not training time
        # All ranks learn of a request after the same step. Save before an evaluation, which may take longer than the
        # process has left.
        stop_requested = self.stop.requested()
        if stop_requested or plan.due(settings.save_strategy, settings.save_steps, step):
            self.save_checkpoint(step)
        if stop_requested and step < plan.total_steps:
            saved, when = self.checkpoints.latest_valid, f"after step {step} of {plan.total_steps}, on request"
            if saved is None or step_of(saved) != step:
                raise RunError(f"stopped {when}, but its checkpoint could not be written")
            raise Preempted(f"{when}; resume with --resume_from_checkpoint {self.folder}")
        if step == plan.total_steps:
            self.bar.close()
        return evaluation_is_due

    def write_steps(self) -> None:
        """Append the pending steps to steps.jsonl, and print a line for some of them. Collective.

        Raises:
            RunError: a gradient norm is not finite, other than by an overflow in fp16. The steps before it are written.
        """
        if not self.steps.pending:
            return
        lines, failure = self.steps.reduce()
        if lines:
            self._append(STEPS.name, lines)
            self.bar.set_postfix(loss=f"{lines[-1]['loss']:.4f}", refresh=False)
        if self.vocabulary is not None:
            done = [line["learning_rate"] for line in lines if line["grad_norm"] is not None]  # others were skipped
            self.vocabulary.decay(done, self.settings.weight_decay)
        if failure is not None:
            raise failure
        # About 20 lines of a run: after each logging interval in which another twentieth of its steps has been done.
        step, interval, total = self.steps.last_step, self.settings.logging_steps, self.plan.total_steps
        if step == total or (step % interval == 0 and 20 * step // total > 20 * (step - interval) // total):
            self.world.print_main(console_line(lines, total))

    def after_evaluation(self, step: int, eval_set_name: str, metrics: Mapping[str, float]) -> None:
        """Record an evaluation, and keep the weights if they are the best so far. Collective."""
        epoch = step / self.plan.steps_per_epoch
        line: dict[str, Any] = {"step": step, "epoch": epoch, "rows": eval_set_name}
        line |= {name: metrics[name] for name in ("n", "accuracy", "f1", "loss")}
        self.best.add(line, self.state)  # first: a line in evaluations.jsonl tells that they are complete
        self._append(EVALUATIONS.name, [line])
        self.world.print_main(
            f"epoch {epoch:.2f}: {eval_set_name} accuracy {metrics['accuracy']:.4f}, loss {metrics['loss']:.4f}"
        )
        if self.world.is_main_process:
            self.best.remove_unused()
        self.steps.start_clock()  # an evaluation does not count as training time
        self.early_stopping.add(metrics)
        if self.early_stopping.stops:
            self.world.print_main(f"step {step}/{self.plan.total_steps}: {self.early_stopping}")
            self.bar.close()

    def _append(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        if not self.world.is_main_process:
            return
        text, log = [json.dumps(line, allow_nan=False) + "\n" for line in lines], self.logs[name]
        if not self.folder.is_dir():
            raise FileNotFoundError(f"{self.folder}: the run's folder is gone")
        warn_once = (lambda _: None) if log.pending else self.world.print_main
        try:
            log.append(text)
        except OSError as problem:  # the log keeps the lines in memory until they can be written
            if self.settings.on_save_failure == "stop":  # as an error of this rank alone: the others lose contact
                raise OSError(f"{log.path} could not be written: {problem.strerror or problem}") from None
            stop_or_warn(log.path, problem, "continue", warn=warn_once)
        self.trackers.log(name, lines)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def save_checkpoint(self, step: int) -> None:
        """Write the checkpoint of a step. Collective."""
        self.write_steps()

        def write(folder: Path) -> list[str]:
            if self.world.is_main_process:
                for log in self.logs.values():  # resuming needs their lines, so they must survive a power failure too
                    log.flush()
                flush(self.folder)
            return self.state.save(folder)

        run_state = run_state_content(self.run, step)
        if self.checkpoints.save(f"{PREFIX}{step}", write, run_state) and self.world.is_main_process:
            self.best.remove_unused()
        self.steps.start_clock()
