"""What a run leaves behind: one folder, the same files from both roads. `compare` knows a run by these alone.

Only rank 0 writes. Each file but the two logs is written aside and renamed, so a file that is there is whole.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from app.cells import escape
from app.distributed.checkpoints import PREFIX, Checkpoints, newest_first, problem_of, remove, step_of
from app.distributed.processes import (
    World,
    agree,
    first_problem,
    from_main,
    gather_objects,
    peak_memory_bytes,
    progress,
    reduce_mean,
    reduce_sum,
    remember,
)
from app.distributed.training_state import read_weights, write_weights
from app.errors import Preempted, RunError, UserError
from app.files import RUNS, create_folder, flush, lock, write_json, write_text
from app.machine import device_name, git_commit, peak_flops
from app.metrics.score import Scores
from app.report.model_card import write_model_card
from app.resume import LOGS, RESULTS, RUN_FOLDER, STATE, Resume
from app.reviews.batches import BatchPlan
from app.reviews.split import Split
from app.reviews.table import ReviewTable
from app.settings import Settings

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
        self, path_name: str, settings: Settings, table: ReviewTable, split: Split, world: World, resume: Resume
    ) -> None:
        """Creates the folder with settings.json and split.json, or goes on with one that is there.

        Raises:
            AgreedError: the folder can't be had, or another job has it.
        """
        self.path_name, self.settings, self.table, self.split, self.world = path_name, settings, table, split, world
        devices = gather_objects(device_name(world.device))
        problem, folder, self.lock = None, resume.folder, None
        if world.is_main:
            try:
                folder = folder or create_folder(settings.output_dir, RUNS / path_name)
                self.lock = lock(folder)
            except UserError as error:
                problem = str(error)
        agree(problem)
        self.folder: Path = from_main(folder)  # type: ignore[assignment]
        if world.is_main:
            remember(RUN_FOLDER, str(self.folder.resolve()))  # for the processes that torchrun starts if these die
        self.model_folder = self.folder / "model"
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints", settings.save_total_limit, settings.on_save_failure, world
        )
        self.pending: list[Step] = []
        self.totals = Totals(**resume.state.get("totals", {}))
        self.best = Best(**resume.state.get("best", {}))
        progress.step, progress.checkpoint = resume.step, resume.checkpoint
        self.checkpoints.last_good = resume.checkpoint
        self.last_loss = float("nan")
        if world.is_main:
            self._take_best_along(resume)
            for later in newest_first(self.checkpoints.folder):
                if step_of(later) > resume.step:  # damaged, or of steps that are now done again
                    remove(later)
            for name in LOGS:
                if lines := resume.lines_of(name):
                    write_text(self.folder / name, "".join(lines))
                else:
                    (self.folder / name).unlink(missing_ok=True)
            for name in RESULTS:
                (self.folder / name).unlink(missing_ok=True)
            write_json(self.folder / "settings.json", self._settings(devices))
            write_json(self.folder / "split.json", self._split())
        self.start_clock()

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
        masks = [batch["attention_mask"] for batch in batches]
        progress.step = step
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
        """Reduces the pending steps over the ranks, all in two collectives, and appends them to steps.jsonl."""
        if not self.pending:
            return
        device = self.world.device
        losses = reduce_mean(torch.stack([step.loss.double() for step in self.pending]).to(device)).tolist()
        tokens = torch.stack([step.tokens for step in self.pending]).to(device)
        others = torch.tensor([[step.examples, step.padded_tokens] for step in self.pending], device=device)
        counts = reduce_sum(torch.cat([tokens.unsqueeze(1), others], dim=1)).tolist()
        lines = []
        for step, loss, (tokens_, examples, padded) in zip(self.pending, losses, counts, strict=True):
            line = dataclasses.asdict(step) | {"loss": loss, "grad_norm": float(step.grad_norm)}
            line |= {"tokens": tokens_, "examples": examples, "padded_tokens": padded}
            lines.append(json.dumps(line, allow_nan=False) + "\n")
            self.totals.train_seconds += step.seconds
            self.totals.tokens += tokens_
            self.totals.examples += examples
            self.totals.padded_tokens += padded
        self.last_loss = losses[-1]
        self.pending.clear()
        self._append("steps.jsonl", "".join(lines))

    def write_evaluation(self, step: int, epoch: float, rows: str, n: int, figures: Mapping[str, float]) -> None:
        """Appends a line to evaluations.jsonl and shows it: accuracy, f1 and loss of the n rows that are `validation`
        or `test`."""
        line = {"step": step, "epoch": epoch, "rows": rows, "n": n}
        line |= {name: figures[name] for name in ("accuracy", "f1", "loss")}
        self._append("evaluations.jsonl", json.dumps(line, allow_nan=False) + "\n")
        if self.world.is_main:
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
        peak_memory = gather_objects(peak_memory_bytes(self.world.device))
        if not self.world.is_main:
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
        aside = self.folder / ".model.tmp"
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        write_model_card(
            aside / "README.md", self.path_name, self.settings, self._split(), self.table.class_names, metrics
        )
        shutil.rmtree(self.model_folder, ignore_errors=True)
        os.replace(aside, self.model_folder)
        self._write_predictions(logits)
        write_json(self.folder / "metrics.json", metrics)
        assert self.lock is not None
        os.close(self.lock)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def save_checkpoint(self, step: int, plan: BatchPlan, fill: Callable[[Path], None]) -> None:
        """Writes the checkpoint of a step: the files of `fill`, called on every rank, and what this record holds.
        Collective."""
        self.write_steps()

        def fill_with_state(folder: Path) -> None:
            fill(folder)
            if self.world.is_main:
                write_json(folder / STATE, self._state(step, plan))
                for log in filter(Path.exists, (self.folder / name for name in LOGS)):
                    flush(log)  # a resumed run goes on with its lines: they must be as safe as the checkpoint

        if self.checkpoints.save(f"{PREFIX}{step}", fill_with_state):
            progress.checkpoint = self.checkpoints.last_good
            if self.world.is_main:
                self._drop_forgotten_bests()
        self.start_clock()

    def keep_best(self, step: int, model: torch.nn.Module, figures: Mapping[str, float]) -> None:
        """Keeps the weights aside if no earlier ones were better on the validation rows. Collective."""
        metric = self.settings.metric_for_best_model
        if not self.settings.load_best_model_at_end or self.best.beats(figures[metric], metric):
            return

        def fill(folder: Path) -> None:
            if self.world.is_main:
                write_weights(folder, model)

        if self.checkpoints.save(f"best-{step}", fill):
            self.best = Best(step, figures[metric])

    def load_best(self, model: torch.nn.Module) -> None:
        """Gives the model the best weights back, on every rank. Collective."""
        if self.settings.load_best_model_at_end and self.best.step:
            folder = self.checkpoints.folder / f"best-{self.best.step}"
            problem = problem_of(folder) if self.world.is_main else None
            if first_problem(problem):
                raise RunError(f"{folder}: the best weights are damaged: {problem}")
            if self.world.is_main:
                read_weights(folder, model)
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, src=0)
            self.world.say(f"{'best weights':>14}  of step {self.best.step}: {self._best_figure()}")

    def _take_best_along(self, resume: Resume) -> None:
        """A run that goes on in another folder than its checkpoint's needs the best weights there."""
        if resume.best is not None:
            target = self.checkpoints.folder / resume.best.name
            if resume.best.is_dir() and resume.best.resolve() != target.resolve():
                shutil.copytree(resume.best, target, dirs_exist_ok=True)

    def _drop_forgotten_bests(self) -> None:
        """Removes the best weights that no checkpoint knows of: each one that is kept may have to be gone on from."""
        known = set()
        for checkpoint in newest_first(self.checkpoints.folder):
            with suppress(OSError, ValueError, KeyError):  # a damaged one knows of none
                known.add(f"best-{json.loads((checkpoint / STATE).read_text(encoding='utf-8'))['best']['step']}")
        for old in self.checkpoints.folder.glob("best-*"):
            if old.name not in known:
                remove(old)

    def preempted(self, step: int, total_steps: int) -> Exception:
        """What ends a run that was told to stop behind a step."""
        told = f"after step {step} of {total_steps}, on request"
        if progress.checkpoint is None or step_of(progress.checkpoint) != step:
            return RunError(f"stopped {told}, but its checkpoint could not be written")
        return Preempted(f"{told}; go on with --resume_from_checkpoint {self.folder}")

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
            "fingerprint": self.split.fingerprint,
            "settings": self.settings.as_dict(),
            "totals": dataclasses.asdict(self.totals),
            "best": dataclasses.asdict(self.best),
        }

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _append(self, name: str, text: str) -> None:
        if self.world.is_main:
            with (self.folder / name).open("a", encoding="utf-8") as file:
                file.write(text)

    def _settings(self, devices: list[str]) -> dict[str, Any]:
        return self.settings.as_dict() | {
            "path": self.path_name,
            "csv": str(self.table.path),
            "world_size": self.world.size,
            "devices": devices,
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
        aside = self.folder / ".predictions.csv.tmp"
        with aside.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
            chances_of = [escape(f"probability_{name}") for name in names]
            writer.writerow(["row", "label", "predicted", *chances_of, "review"])
            for position, chances, best in zip(test, probabilities, logits.argmax(axis=1), strict=True):
                label, predicted = names[self.table.labels[position]], names[best]
                text = self.table.texts.iloc[position]
                cells = [escape(label), escape(predicted), *chances.tolist(), escape(text)]
                writer.writerow([int(self.table.rows[position]), *cells])
        os.replace(aside, self.folder / "predictions.csv")

    def _mfu(self, model: PreTrainedModel) -> float | None:
        """Model FLOPs utilisation (Chowdhery et al. 2022, appendix B, without the attention term): 6 FLOPs a parameter
        and token that was no padding, over what the devices could do; None where that isn't known."""
        peak = peak_flops(device_name(self.world.device), self.settings.precision or "fp32")
        if peak is None:
            return None
        parameters = model.num_parameters(exclude_embeddings=True)
        return 6.0 * parameters * self.totals.tokens / self.totals.train_seconds / (peak * self.world.size)
