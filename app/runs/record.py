"""What a run leaves behind: one folder, the same files from both roads. `compare` knows a run by these alone.

Only rank 0 writes. Each file but the two logs is written aside and renamed, so a file that is there is whole.
"""

from __future__ import annotations

import csv
import dataclasses
import errno
import json
import math
import os
import platform
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from app.checkpoint.manager import PREFIX, CheckpointManager, latest_first, problem_of, remove, step_of
from app.checkpoint.state import read_weights, write_weights
from app.data.csv_table import ReviewTable
from app.data.sampler import BatchPlan
from app.data.split import Split
from app.distributed.collectives import (
    all_gather_object,
    broadcast_object,
    broadcast_tensors,
    first_failure,
    raise_on_all_ranks,
    reduce_mean,
    reduce_sum,
)
from app.distributed.world import World
from app.errors import Preempted, RunError, UserError, escape_control_characters
from app.files import commit, flush, write_json, write_text
from app.hardware import device_name, git_commit, peak_flops, peak_memory_bytes
from app.metrics.score import Scores
from app.runs.cells import escape
from app.runs.folder import RUNS, claim_folder, point_latest, remove_claimed
from app.runs.metrics_log import MetricsLog
from app.runs.model_card import write_model_card
from app.runs.resume import CHECKPOINT_FILES, EVALUATIONS, LOGS, MODEL, RESULTS, STATE, STEPS, Resume
from app.settings import Settings
from app.training.loss_guard import nonfinite_error

PACKAGES = (
    "torch",
    "transformers",
    "datasets",
    "evaluate",
    "accelerate",
    "tokenizers",
    "pandas",
    "scikit-learn",
    "numpy",
)


# ---- a run's record -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Step:
    """One optimizer step as this rank saw it. Tensors stay where they are until the interval's one reduction."""

    step: int
    epoch: float
    loss: torch.Tensor
    grad_norm: torch.Tensor
    learning_rate: float
    examples: int
    tokens: torch.Tensor
    padded_tokens: int
    seconds: float


@dataclasses.dataclass
class Totals:
    """Of all steps so far, over all ranks; `padded_tokens` are tokens and padding."""

    train_seconds: float = 0.0
    examples: int = 0
    tokens: int = 0
    padded_tokens: int = 0

    @property
    def examples_per_second(self) -> float:
        return self.examples / self.train_seconds


@dataclasses.dataclass
class Best:
    """The step whose weights were best on the validation rows so far, and its figure; step 0: none yet."""

    step: int = 0
    value: float | None = None

    def beats(self, value: float, metric: str) -> bool:
        """Whether `value` is no better than what there is."""
        return self.value is not None and (value >= self.value if metric == "loss" else value <= self.value)


class RunRecord:
    """The files of one run. Every rank holds one and calls the same methods: `write_steps` and `finish` are
    collective."""

    def __init__(
        self,
        path_name: str,
        settings: Settings,
        table: ReviewTable,
        split: Split,
        world: World,
        resume: Resume,
        rows_of_step: Callable[[int], Sequence[int]],
        model_commit: str | None = None,
    ) -> None:
        """Claim the run's folder. Nothing in it changes before `begin`.

        Args:
            rows_of_step: this rank's data rows of an optimizer step, counted from 1.
            model_commit: the commit on the Hub that the model was loaded from; None for any other model.

        Raises:
            AgreedError: the folder can't be created or written, another job uses it, or not all ranks see it.
        """
        self.path_name, self.settings, self.table, self.split, self.world = path_name, settings, table, split, world
        self.resume, self.rows_of_step, self.model_commit = resume, rows_of_step, model_commit
        self.devices = all_gather_object(device_name(world.device), world)
        folder, self.lock = resume.folder, resume.lock
        with raise_on_all_ranks(world):
            if world.is_main_process and folder is None:
                folder, self.lock = claim_folder(settings.output_dir, RUNS / path_name)
        self.folder: Path = broadcast_object(folder, world)  # type: ignore[assignment]
        if settings.save_strategy != "no" or settings.load_best_model_at_end:
            self._check_shared()
        self.model_folder = self.folder / "model"
        self.checkpoints = CheckpointManager(
            self.folder / "checkpoints", settings.save_total_limit, settings.on_save_failure, world
        )
        self.logs = {name: MetricsLog(self.folder / name) for name in LOGS}
        self.pending: list[Step] = []
        self.totals = Totals(**resume.state.get("totals", {}))
        self.best = Best(**resume.state.get("best", {}))
        self.step = resume.step  # the last step, for error messages
        self.checkpoints.latest_valid = resume.checkpoint
        self.last_loss = float("nan")

    def begin(self, plan: BatchPlan) -> bool:
        """Bring the folder to the state of the checkpoint, once the training state has been loaded from it. Collective.

        Only here does a resumed run remove what came after its checkpoint: a checkpoint that can't be loaded after all
        has cost nothing.

        Returns:
            Whether the checkpoint's own step is still to be evaluated. A checkpoint is written before the evaluation of
            the same step, so it never knows the outcome.

        Raises:
            AgreedError: the folder can't be written.
        """
        evaluate = self.resume.step > 0 and plan.due(
            self.settings.eval_strategy, self.settings.eval_steps, self.resume.step
        )
        with raise_on_all_ranks(self.world):
            if self.world.is_main_process:
                try:
                    self._reset_folder(self.resume.step if evaluate else None)
                except OSError as problem:
                    reason = problem.strerror or problem
                    raise UserError(f"--output_dir {self.folder}: can't be written: {reason}") from None
        self.start_clock()
        return evaluate

    def _reset_folder(self, evaluate_again: int | None) -> None:
        for name in RESULTS:
            (self.folder / name).unlink(missing_ok=True)
        for later in latest_first(self.checkpoints.folder):
            if step_of(later) > self.resume.step:  # damaged, or of steps that are run again
                remove(later)
        # A restarted job recognizes its folder by settings.json and resumes from the latest checkpoint in it. So this
        # comes after later checkpoints are gone, and before anything is written to a new folder.
        write_json(self.folder / "settings.json", self._settings())
        write_json(self.folder / "split.json", self._split())
        if self.settings.output_dir is None and self.resume.folder is None:
            point_latest(self.folder)  # only now: `auto` looks there for settings.json
        self._copy_best_weights()
        for name in LOGS:
            if lines := self.resume.lines_of(name, before=evaluate_again if name == EVALUATIONS else None):
                write_text(self.folder / name, "".join(lines))
            else:
                (self.folder / name).unlink(missing_ok=True)

    def _check_shared(self) -> None:
        """Refuse a folder that only some nodes see: their checkpoints could not be resumed. Collective."""
        name = broadcast_object(f".shared-{uuid.uuid4().hex}.tmp", self.world)
        with raise_on_all_ranks(self.world):
            if self.world.is_main_process:
                try:
                    (self.folder / name).touch()
                except OSError as problem:
                    raise UserError(f"--output_dir {self.folder}: can't be written: {problem.strerror}") from None
        seen = all_gather_object((self.folder / name).exists(), self.world)
        with raise_on_all_ranks(self.world):
            if self.world.is_main_process:
                with suppress(OSError):
                    (self.folder / name).unlink()
            if not all(seen):
                if self.world.is_main_process and self.resume.folder is None:
                    remove_claimed(self.folder)
                ranks = ", ".join(str(rank) for rank, here in enumerate(seen) if not here)
                raise UserError(
                    f"--output_dir {self.folder}: rank(s) {ranks} can't see it: name a folder on a file system that "
                    "all nodes share, or turn checkpoints off with --save_strategy no"
                )

    @contextmanager
    def locate_failures(self) -> Iterator[None]:
        """Add the last step and the latest valid checkpoint to an exception, for its error line."""
        try:
            yield
        except Exception as failure:
            checkpoint = self.checkpoints.latest_valid or "none"
            failure.add_note(f"after step {self.step}; latest valid checkpoint: {checkpoint}")
            raise

    def start_clock(self) -> None:
        """Training time runs from here: to be called after anything that is no training, such as an evaluation."""
        self._clock = time.perf_counter()

    def add_step(
        self,
        step: int,
        epoch: float,
        loss: torch.Tensor,
        grad_norm: torch.Tensor,
        learning_rate: float,
        batches: list[dict[str, torch.Tensor]],
    ) -> None:
        """Keeps one optimizer step: this rank's mean loss, the global gradient norm before clipping, its
        micro-batches."""
        now = time.perf_counter()
        # A model that takes no mask reads padding as text, so all positions count as tokens.
        masks = [
            batch["attention_mask"] if "attention_mask" in batch else torch.ones_like(batch["input_ids"])
            for batch in batches
        ]
        self.step = step
        self.pending.append(
            Step(
                step,
                epoch,
                loss,
                grad_norm,
                learning_rate,
                examples=sum(len(mask) for mask in masks),
                tokens=torch.stack([mask.sum() for mask in masks]).sum(),
                padded_tokens=sum(mask.numel() for mask in masks),
                seconds=now - self._clock,
            )
        )
        self._clock = now

    def write_steps(self) -> None:
        """Reduce the pending steps over the ranks, all in two collectives, and append them to steps.jsonl.

        Raises:
            RunError: a gradient norm is not finite. Steps before it are written; the optimizer skipped that step (see
                `skip_step_if_nonfinite`), and what followed it is discarded.
        """
        if not self.pending:
            return
        device = self.world.device
        losses = reduce_mean(torch.stack([step.loss.double() for step in self.pending]).to(device), self.world).tolist()
        tokens = torch.stack([step.tokens for step in self.pending]).to(device)
        others = torch.tensor([[step.examples, step.padded_tokens] for step in self.pending], device=device)
        counts = reduce_sum(torch.cat([tokens.unsqueeze(1), others], dim=1), self.world).tolist()
        # The one place that waits for the device: all norms of the interval at once. They are equal on every rank.
        norms = torch.stack([step.grad_norm.double() for step in self.pending]).tolist()
        failed = next((i for i, norm in enumerate(norms) if not math.isfinite(norm)), None)
        lines = []
        for step, loss, norm, (tokens_, examples, padded) in list(
            zip(self.pending, losses, norms, counts, strict=True)
        )[:failed]:
            line = dataclasses.asdict(step) | {"loss": loss, "grad_norm": norm}
            line |= {"tokens": tokens_, "examples": examples, "padded_tokens": padded}
            lines.append(json.dumps(line, allow_nan=False) + "\n")
            self.totals.train_seconds += step.seconds
            self.totals.tokens += tokens_
            self.totals.examples += examples
            self.totals.padded_tokens += padded
        self.last_loss = losses[-1]
        self._append(STEPS, "".join(lines))
        if failed is not None:
            step = self.pending[failed]
            self.step = step.step - 1
            raise nonfinite_error(step.step, step.loss, step.grad_norm, self.rows_of_step(step.step), self.world)
        self.pending.clear()

    def write_evaluation(self, step: int, epoch: float, rows: str, n: int, figures: Mapping[str, float]) -> None:
        """Appends a line to evaluations.jsonl and shows it: accuracy, f1 and loss of the n rows that are `validation`
        or `test`."""
        line = {"step": step, "epoch": epoch, "rows": rows, "n": n}
        line |= {name: figures[name] for name in ("accuracy", "f1", "loss")}
        self._append(EVALUATIONS, json.dumps(line, allow_nan=False) + "\n")
        if self.world.is_main_process:
            tqdm.write(f"epoch {epoch:.2f}: {rows} accuracy {line['accuracy']:.4f}, loss {line['loss']:.4f}")

    def finish(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        logits: NDArray[np.floating[Any]],
        scores: Scores,
    ) -> None:
        """Writes the model, predictions.csv and, last, metrics.json: a run that has it is complete.

        Args:
            logits: float (n_test, classes), of the test rows in file order.
        """
        peak_memory = all_gather_object(peak_memory_bytes(self.world.device), self.world)
        if not self.world.is_main_process:
            return
        metrics = dataclasses.asdict(scores)
        metrics["n_test"] = metrics.pop("n")
        totals = self.totals
        metrics |= {
            "train_seconds": totals.train_seconds,
            "train_examples_per_second": totals.examples_per_second,
            "train_tokens_per_second": totals.tokens / totals.train_seconds,
            "padding_fraction": 1 - totals.tokens / totals.padded_tokens,
            "mfu": self._mfu(model),
            "peak_memory_bytes": peak_memory,
        }
        for log in self.logs.values():
            log.flush()  # a run is finished only with complete logs
        staging = self.folder / ".model.tmp"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()  # save_pretrained would also create a run folder that is gone
        try:
            model.save_pretrained(staging)
            tokenizer.save_pretrained(staging)
        except (OSError, SafetensorError) as problem:
            shutil.rmtree(staging, ignore_errors=True)
            raise OSError(f"{self.model_folder} could not be written: {problem}") from None
        write_model_card(
            staging / "README.md",
            self.path_name,
            self.settings,
            self.model_commit,
            self._split(),
            self.table.class_names,
            metrics,
        )
        if not (self.folder / "settings.json").is_file():  # the folder was moved away, and save_pretrained made another
            shutil.rmtree(staging)
            with suppress(OSError):
                self.folder.rmdir()
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.folder))
        commit(staging, self.model_folder)
        self._write_predictions(logits)
        write_json(self.folder / "metrics.json", metrics)
        assert self.lock is not None
        os.close(self.lock)
        self.lock = None

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def save_checkpoint(self, step: int, plan: BatchPlan, fill: Callable[[Path], None]) -> None:
        """Writes the checkpoint of a step: the files of `fill`, called on every rank, and what this record holds.
        Collective."""
        self.write_steps()

        def fill_with_state(folder: Path) -> None:
            fill(folder)
            if self.world.is_main_process:
                write_json(folder / STATE, self._state(step, plan))
                for log in self.logs.values():  # resuming needs their lines: they must be as safe as the checkpoint
                    log.flush()
                flush(self.folder)

        saved = self.checkpoints.save(f"{PREFIX}{step}", fill_with_state, CHECKPOINT_FILES)
        if saved and self.world.is_main_process:
            self._remove_unused_best_weights()
        self.start_clock()

    def keep_best(self, step: int, model: torch.nn.Module, figures: Mapping[str, float]) -> None:
        """Keep the weights if no earlier ones were better on the validation rows. Collective."""
        metric = self.settings.metric_for_best_model
        if not self.settings.load_best_model_at_end or self.best.beats(figures[metric], metric):
            return

        def fill(folder: Path) -> None:
            if self.world.is_main_process:
                write_weights(folder, model.state_dict())

        if self.checkpoints.save(f"best-{step}", fill, (MODEL,)):
            self.best = Best(step, figures[metric])
            if self.world.is_main_process:
                self._remove_unused_best_weights()

    def load_best(self, model: torch.nn.Module) -> None:
        """Gives the model the best weights back, on every rank. Collective."""
        if self.settings.load_best_model_at_end and self.best.step:
            folder = self.checkpoints.folder / f"best-{self.best.step}"
            problem = problem_of(folder) if self.world.is_main_process else None
            if (problem := first_failure(problem, self.world)) is not None:
                raise RunError(f"{folder}: the best weights are damaged: {problem}")
            if self.world.is_main_process:
                model.load_state_dict(read_weights(folder))
            broadcast_tensors(model.state_dict().values(), self.world)
            self.world.print_main(f"{'best weights':>14}  of step {self.best.step}: {self._best_figure()}")

    def _copy_best_weights(self) -> None:
        """A run that resumes in another folder than its checkpoint's needs the best weights there."""
        best = self.resume.best
        if best is not None and best.is_dir():
            target, staging = self.checkpoints.folder / best.name, self.folder / ".best.tmp"
            if best.resolve() != target.resolve():
                shutil.rmtree(staging, ignore_errors=True)
                shutil.copytree(best, staging)
                self.checkpoints.folder.mkdir(exist_ok=True)
                commit(staging, target)

    def _remove_unused_best_weights(self) -> None:
        """Keep the best weights so far, and those that a resume from one of the checkpoints would need."""
        used = {f"best-{self.best.step}"}
        for checkpoint in latest_first(self.checkpoints.folder):
            with suppress(OSError, ValueError, KeyError):  # a damaged checkpoint names none
                used.add(f"best-{json.loads((checkpoint / STATE).read_text(encoding='utf-8'))['best']['step']}")
        for old in self.checkpoints.folder.glob("best-*"):
            if old.name not in used:
                remove(old)

    def preempted(self, step: int, total_steps: int) -> Exception:
        """The exception that ends a run that was asked to stop."""
        where = f"after step {step} of {total_steps}, on request"
        saved = self.checkpoints.latest_valid
        if saved is None or step_of(saved) != step:
            return RunError(f"stopped {where}, but its checkpoint could not be written")
        return Preempted(f"{where}; resume with --resume_from_checkpoint {self.folder}")

    def _best_figure(self) -> str:
        return f"validation {self.settings.metric_for_best_model} {self.best.value:.4f}"

    def _state(self, step: int, plan: BatchPlan) -> dict[str, Any]:
        return {
            "path": self.path_name,
            "step": step,
            "epoch": step / plan.steps_per_epoch,
            "samples_seen": step * plan.global_size,
            "total_steps": plan.total_steps,
            "world_size": self.world.size,
            "device": self.world.device.type,
            "threads": torch.get_num_threads(),
            "fingerprint": self.split.fingerprint,
            "settings": self.settings.as_dict(),
            "model_commit": self.model_commit,
            "totals": dataclasses.asdict(self.totals),
            "best": dataclasses.asdict(self.best),
        }

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _append(self, name: str, lines: str) -> None:
        """Append to a log. If that fails, such as on a full disk, `--on_save_failure` decides, as for a checkpoint."""
        if not self.world.is_main_process:
            return
        log = self.logs[name]
        had_failed = bool(log.pending)
        try:
            log.append(lines)
        except OSError as problem:
            if self.settings.on_save_failure == "stop" or not self.folder.is_dir():
                raise
            if not had_failed:
                path = escape_control_characters(str(log.path))
                self.world.print_main(
                    f"warning: {path} could not be written: {problem.strerror}; training continues, and its lines are "
                    "kept in memory until they can be (--on_save_failure continue)"
                )

    def _settings(self) -> dict[str, Any]:
        return self.settings.as_dict() | {
            "path": self.path_name,
            "model_commit": self.model_commit,
            "csv": str(self.table.path),
            "world_size": self.world.size,
            "devices": self.devices,
            "launchers": list(self.resume.launchers),
            "threads": torch.get_num_threads(),
            "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
            "git_commit": git_commit(),
        }

    def _split(self) -> dict[str, Any]:
        return {
            "csv": self.table.path.name,
            "csv_sha256": self.table.sha256,
            "rows_read": self.table.rows_read,
            "rows_dropped": {reason: len(rows) for reason, rows in self.table.dropped.items()},
            "classes": list(self.table.class_names),
            "seed": self.settings.seed,
            "test_size": self.settings.test_size,
            "validation_size": self.settings.validation_size,
            "n_train": len(self.split.train),
            "n_validation": len(self.split.validation),
            "n_test": len(self.split.test),
            "fingerprint": self.split.fingerprint,
            "csv_escape": "'",  # predictions.csv is written by app.cells.escape
        }

    def _write_predictions(self, logits: NDArray[np.floating[Any]]) -> None:
        probabilities = torch.from_numpy(logits).double().softmax(dim=1).numpy()
        names, test = self.table.class_names, self.split.test
        staging = self.folder / ".predictions.csv.tmp"
        with staging.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
            chances_of = [escape(f"probability_{name}") for name in names]
            writer.writerow(["row", "label", "predicted", *chances_of, "review"])
            for position, chances, best in zip(test, probabilities, logits.argmax(axis=1), strict=True):
                label, predicted = names[self.table.labels[position]], names[best]
                text = self.table.texts.iloc[position]
                cells = [escape(label), escape(predicted), *chances.tolist(), escape(text)]
                writer.writerow([int(self.table.rows[position]), *cells])
        commit(staging, self.folder / "predictions.csv")

    def _mfu(self, model: PreTrainedModel) -> float | None:
        """Model FLOPs utilisation (Chowdhery et al. 2022, appendix B, without the attention term): 6 FLOPs a parameter
        and token that was no padding, over what the devices could do; None where that isn't known."""
        peaks = [peak_flops(name, self.settings.precision or "fp32") for name in self.devices]  # ranks may differ
        known = [peak for peak in peaks if peak is not None]
        if len(known) < len(peaks):
            return None
        parameters = model.num_parameters(exclude_embeddings=True)
        return 6.0 * parameters * self.totals.tokens / self.totals.train_seconds / sum(known)
