"""The record of a run in progress: it writes the run's folder, the same files in both training paths.

Rank 0 writes all files except each rank's part of a checkpoint. Except for the two logs, files are staged and renamed
(checkpoints as a directory), so a file that exists is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoint.manager import PREFIX, CheckpointManager, step_of
from ..common.errors import Preempted, RunError
from ..common.files import flush, write_json
from ..common.machine import peak_memory_bytes
from ..common.terminal import hides_progress
from ..data.sampler import BatchPlan
from ..distributed.collectives import all_gather_object
from ..distributed.preemption import StopRequest
from ..metrics.early_stopping import EarlyStopping
from ..metrics.score import Scores
from ..model.dropout import NOTE_ON_DRAWS, draws_per_micro_batch
from ..model.vocabulary import TrimmedVocabulary, complete_state
from ..runs.schema import CHECKPOINTS, EVALUATIONS, LOGS, METRICS, MODEL_FOLDER, RUN_STATE, STEPS, checkpoint_files
from ..strategies.base import Strategy
from ..strategies.fsdp import wrapper_name
from .best import Best, BestWeights, remove_unused_best
from .results import metrics_content, stage_model, write_results
from .run_folder import RunFolder, run_state_content
from .steps import MetricsLog, RowsOfStep, StepLog, Totals, console_line
from .trackers import Trackers


class RunRecord:
    """The files of one run. Most methods are collective: every rank calls them in the same order."""

    def __init__(
        self, run_folder: RunFolder, rows_of_step: RowsOfStep, vocabulary: TrimmedVocabulary | None = None
    ) -> None:
        """`vocabulary` holds the embeddings that are not trained, if there are any."""
        self.vocabulary = vocabulary
        self.run_folder, self.folder = run_folder, run_folder.path
        self.info, self.resume = run_folder.info, run_folder.resume
        self.settings, self.world = self.info.settings, self.info.world
        folder, resume = self.folder, self.resume
        self.model_folder = folder / MODEL_FOLDER
        self.checkpoints = CheckpointManager(
            folder / CHECKPOINTS, self.settings.save_total_limit, self.settings.on_save_failure, world=self.world
        )
        self.checkpoints.latest_valid = resume.checkpoint
        self.logs = {name: MetricsLog(folder / name) for name in LOGS}
        totals = Totals(**resume.state.get("totals", {}))
        precision, comm_hook = self.settings.precision, self.settings.ddp_comm_hook
        self.steps = StepLog(
            precision, comm_hook, self.world, rows_of_step=rows_of_step, totals=totals, step=resume.step
        )
        self.best = BestWeights(run_folder, self.checkpoints, Best(**resume.state.get("best", {})))
        self.trackers = Trackers(folder, self.info, warn=self._print)
        self.early_stopping = EarlyStopping(self.settings)
        self.results_hash: str | None = None  # known on rank 0 once the run has finished

    # ---- start and end of a run -------------------------------------------------------------------------------------

    def begin(
        self,
        plan: BatchPlan,
        wrapped: torch.nn.Module,
        *,
        save: Callable[[Path], None],
        stop: StopRequest,
        profile_step: Callable[[], None],
    ) -> bool:
        """Start the record, after the training state has been loaded from the checkpoint. Collective.

        Args:
            wrapped: the model as returned by `strategy.wrap`, whose class is recorded.
            save: `save(folder)`, called on every rank, writes the training state of a checkpoint.
            profile_step: is called after each step.

        Returns:
            Whether the evaluation after the checkpoint's own step has to be repeated. A checkpoint is written before
            the evaluation of the same step, so it never contains the result.

        Raises:
            AgreedError: the folder cannot be written.
        """
        self.plan, self.save, self.stop, self.profile_step = plan, save, stop, profile_step
        step = self.resume.step
        self.bar = tqdm(
            total=plan.total_steps,
            initial=step,
            unit=" steps",
            disable=hides_progress(self.settings.disable_tqdm, self.world.is_main_process),
        )
        evaluate = step > 0 and plan.due(self.settings.eval_strategy, self.settings.eval_steps, step)
        self.early_stopping.add_all(self.resume.lines_of(EVALUATIONS.name, before=step if evaluate else None))
        self.run_folder.begin(wrapper_name(wrapped), step if evaluate else None)
        self.trackers.start()
        self.steps.start_clock()
        return evaluate

    def finish(
        self,
        strategy: Strategy,
        model: PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase,
        logits: NDArray[np.floating[Any]],
        scores: Scores,
    ) -> None:
        """Write the model, predictions.csv and, last, metrics.json, which marks the run as finished. Collective.

        Args:
            logits: float (n_test, classes), of the test rows in file order.

        Raises:
            OSError: on rank 0, a file cannot be written.
        """
        self.run_folder.reset()  # if the checkpoint is the last step's
        peak_memory = all_gather_object(peak_memory_bytes(self.world.device), self.world)
        state = strategy.gather_model_state(model)
        if not self.world.is_main_process:
            return
        for log in self.logs.values():
            log.flush()  # a run is finished only if its logs are complete
        metrics = metrics_content(scores, self.steps.totals, peak_memory)
        self.results_hash = write_results(
            self.folder,
            self.info,
            metrics=metrics,
            logits=logits,
            stage=lambda: stage_model(self.folder, model, complete_state(model, state), tokenizer=tokenizer),
        )
        results = metrics | {"step": self.plan.total_steps, "hash": self.results_hash}
        self.trackers.log(METRICS.name, [results])
        self.run_folder.unlock()

    @contextmanager
    def locate_failures(self) -> Iterator[None]:
        """Add the last step and the latest valid checkpoint to an exception, for its error line."""
        try:
            yield
        except Exception as failure:
            checkpoint = self.checkpoints.find_latest_valid() or "none"
            failure.add_note(f"after step {self.steps.last_step}; latest valid checkpoint: {checkpoint}")
            raise
        finally:
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
        """Record an optimizer step, as in `Step`; log, save a checkpoint and stop if that is due. Collective.

        Args:
            batches: this rank's micro-batches of the step, on the CPU.

        Returns:
            Whether an evaluation is due.

        Raises:
            Preempted: a rank was asked to stop, and a checkpoint has been saved.
            RunError: as `write_steps`; or the run stops, and its checkpoint could not be written.
        """
        settings, plan = self.settings, self.plan
        if step == self.resume.step + 1 and draws_per_micro_batch(self.world.device):
            self._print(NOTE_ON_DRAWS)
        self.steps.add(step, losses, grad_norm, learning_rate=learning_rate, batches=batches, plan=plan)
        evaluation_is_due = plan.due(settings.eval_strategy, settings.eval_steps, step)
        if step % settings.logging_steps == 0 or step == plan.total_steps:
            self.write_steps()
            self.bar.set_postfix(loss=f"{self.steps.last_loss:.4f}", refresh=False)
        self.bar.update()
        self.profile_step()
        # All ranks learn of a request after the same step. Save before an evaluation, which may take longer than the
        # process has left.
        stop_requested = self.stop.requested()
        if stop_requested or plan.due(settings.save_strategy, settings.save_steps, step):
            self.save_checkpoint(step, self.save)
        if stop_requested and step < plan.total_steps:
            raise self.preempted(step)
        if evaluation_is_due:
            self.write_steps()
        if step == plan.total_steps:
            self.bar.close()
        return evaluation_is_due

    def preempted(self, step: int) -> Exception:
        """Return the exception that ends a run after a stop request."""
        when = f"after step {step} of {self.plan.total_steps}, on request"
        saved = self.checkpoints.latest_valid
        if saved is None or step_of(saved) != step:
            return RunError(f"stopped {when}, but its checkpoint could not be written")
        return Preempted(f"{when}; resume with --resume_from_checkpoint {self.folder}")

    def write_steps(self) -> None:
        """Append the pending steps to steps.jsonl, and print the last one if it ends a logging interval. Collective.

        Raises:
            RunError: a gradient norm is not finite, other than by an overflow in fp16. The steps before it are written.
        """
        if not self.steps.pending:
            return
        lines, failure = self.steps.reduce()
        if lines:  # the first step has succeeded on all ranks
            if not self.run_folder.is_reset:
                self.run_folder.reset()
                self.steps.start_clock()  # removing checkpoints is not training
            self._append(STEPS.name, lines)
        if self.vocabulary is not None:
            done = [line["learning_rate"] for line in lines if line["grad_norm"] is not None]  # others were skipped
            self.vocabulary.decay(done, self.settings.weight_decay)
        if failure is not None:
            raise failure
        # A checkpoint or an evaluation in the middle of an interval writes the steps too, but prints nothing.
        if self.steps.last_step % self.settings.logging_steps == 0 or self.steps.last_step == self.plan.total_steps:
            self._print(console_line(lines, self.plan.total_steps))

    def after_evaluation(
        self, step: int, eval_set_name: str, metrics: Mapping[str, float], *, strategy: Strategy, model: torch.nn.Module
    ) -> None:
        """Record an evaluation, and keep the weights if they are the best so far. Collective."""
        self.write_evaluation(step, eval_set_name, metrics)
        self.best.keep(step, strategy, model, metrics=metrics)
        self.steps.start_clock()  # an evaluation does not count as training time
        self.early_stopping.add(metrics)
        if self.early_stopping.stops:
            self._print(f"step {step}/{self.plan.total_steps}: {self.early_stopping}")
            self.bar.close()

    def write_evaluation(self, step: int, eval_set_name: str, metrics: Mapping[str, float]) -> None:
        """Append a line to evaluations.jsonl, and print it."""
        epoch = step / self.plan.steps_per_epoch
        line = {"step": step, "epoch": epoch, "rows": eval_set_name}
        line |= {name: metrics[name] for name in ("n", "accuracy", "f1", "loss")}
        self.run_folder.write_after_reset(lambda: self._append(EVALUATIONS.name, [line]))
        self._print(
            f"epoch {epoch:.2f}: {eval_set_name} accuracy {metrics['accuracy']:.4f}, loss {metrics['loss']:.4f}"
        )

    def _append(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        if not self.world.is_main_process:
            return
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        if self.settings.on_save_failure == "stop":
            self.logs[name].append(text)
        else:
            self.logs[name].append_or_keep(text, self.world.print_main)
        self.trackers.log(name, lines)

    def _print(self, line: str) -> None:
        if self.world.is_main_process:
            tqdm.write(line)  # above the progress bar, if there is one

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def save_checkpoint(self, step: int, fill: Callable[[Path], None]) -> None:
        """Write the checkpoint of a step. Collective. `fill(staging)` writes this rank's part of the training state."""
        self.write_steps()

        def fill_with_run_state(staging: Path) -> None:
            fill(staging)
            if self.world.is_main_process:
                for log in self.logs.values():  # resuming needs their lines, so they must survive a power failure too
                    log.flush()
                progress = {
                    "step": step,
                    "total_steps": self.plan.total_steps,
                    "totals": asdict(self.steps.totals),
                    "best": asdict(self.best.best),
                    "evaluations": self.logs[EVALUATIONS.name].count_lines(),
                }
                write_json(staging / RUN_STATE, run_state_content(self.info, progress))
                flush(self.folder)

        saved = self.checkpoints.save(f"{PREFIX}{step}", fill_with_run_state, checkpoint_files(self.world.size))
        if saved and self.world.is_main_process:
            remove_unused_best(self.checkpoints.folder, self.best.best)
        self.steps.start_clock()
