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
import subprocess
import time
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from app.distributed.processes import (
    World,
    agree,
    from_main,
    gather_objects,
    peak_memory_bytes,
    reduce_mean,
    reduce_sum,
)
from app.errors import UserError
from app.metrics.score import Scores
from app.report.model_card import write_model_card
from app.reviews.split import Split
from app.reviews.table import ReviewTable
from app.settings import REPOSITORY, Settings

RUNS = Path("runs")
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


# ---- folders and files ----------------------------------------------------------------------------------------------


def create_folder(asked: str | None, parent: Path) -> Path:
    """The folder asked for, which must be new or empty, else a new one under `parent` with `parent/latest` on it.

    Raises:
        UserError: the folder is not empty, is a file, or can't be written.
    """
    folder = Path(asked) if asked is not None else parent / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    try:
        if asked is None:
            folder = _unused(folder)
        elif folder.is_dir() and any(folder.iterdir()):
            raise UserError(f"--output_dir {folder}: exists and is not empty: name a new folder")
        else:
            folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
        if asked is None:
            _point(parent / "latest", folder.name)
    except OSError as problem:
        raise UserError(f"--output_dir {folder}: can't be written: {problem.strerror}") from None
    return folder


def _unused(folder: Path) -> Path:
    """`folder`, or with a number behind it where runs started in the same second; made here, so it is this run's
    alone."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    candidate, number = folder, 1
    while True:
        try:
            candidate.mkdir()
            return candidate
        except FileExistsError:
            number += 1
            candidate = folder.with_name(f"{folder.name}-{number}")


def _point(link: Path, target: str) -> None:
    aside = link.with_name(f".{link.name}.{os.getpid()}")
    aside.symlink_to(target)
    os.replace(aside, link)


def write_text(path: Path, text: str) -> None:
    """Writes a whole file or none of it."""
    aside = path.with_name(f".{path.name}.tmp")
    with aside.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def write_json(path: Path, content: Any) -> None:
    """JSON with every float as `repr` gives it: what is read back is equal to the bit."""
    write_text(path, json.dumps(content, ensure_ascii=False, indent=2) + "\n")


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


class RunRecord:
    """The files of one run. Every rank holds one and calls the same methods: `write_steps` and `finish` are
    collective."""

    def __init__(self, path_name: str, settings: Settings, table: ReviewTable, split: Split, world: World) -> None:
        """Creates the folder with settings.json and split.json.

        Raises:
            AgreedError: the folder can't be had.
        """
        self.path_name, self.settings, self.table, self.split, self.world = path_name, settings, table, split, world
        devices = gather_objects(_device_name(world))
        problem, folder = None, None
        if world.is_main:
            try:
                folder = create_folder(settings.output_dir, RUNS / path_name)
            except UserError as error:
                problem = str(error)
        agree(problem)
        self.folder: Path = from_main(folder)  # type: ignore[assignment]
        self.model_folder = self.folder / "model"
        self.pending: list[Step] = []
        self.train_seconds, self.examples, self.tokens, self.padded_tokens = 0.0, 0, 0, 0
        self.last_loss = float("nan")
        if world.is_main:
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
            lines.append(json.dumps(line) + "\n")
            self.train_seconds += step.seconds
            self.tokens += tokens_
            self.examples += examples
            self.padded_tokens += padded
        self.last_loss = losses[-1]
        self.pending.clear()
        self._append("steps.jsonl", "".join(lines))

    def write_evaluation(self, step: int, epoch: float, rows: str, n: int, figures: Mapping[str, float]) -> None:
        """Appends a line to evaluations.jsonl: accuracy, f1 and loss of the n rows that are `validation` or `test`."""
        line = {"step": step, "epoch": epoch, "rows": rows, "n": n}
        line |= {name: figures[name] for name in ("accuracy", "f1", "loss")}
        self._append("evaluations.jsonl", json.dumps(line) + "\n")

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
        seconds = self.train_seconds
        metrics |= {
            "train_seconds": seconds,
            "train_examples_per_second": self.examples / seconds,
            "train_tokens_per_second": self.tokens / seconds,
            "padding_fraction": 1 - self.tokens / self.padded_tokens,
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
        }

    def _write_predictions(self, logits: NDArray[np.floating[Any]]) -> None:
        probabilities = torch.from_numpy(logits).double().softmax(dim=1).numpy()
        names, test = self.table.class_names, self.split.test
        aside = self.folder / ".predictions.csv.tmp"
        with aside.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["row", "label", "predicted", *(f"probability_{name}" for name in names), "review"])
            for position, chances, best in zip(test, probabilities, logits.argmax(axis=1), strict=True):
                label, predicted = names[self.table.labels[position]], names[best]
                text = self.table.texts.iloc[position]
                cells = [plain_cell(label), plain_cell(predicted), *map(repr, chances.tolist()), plain_cell(text)]
                writer.writerow([int(self.table.rows[position]), *cells])
        os.replace(aside, self.folder / "predictions.csv")

    def _mfu(self, model: PreTrainedModel) -> float | None:
        """Model FLOPs utilisation (Chowdhery et al. 2022, appendix B, without the attention term): 6 FLOPs a parameter
        and token that was no padding, over what the devices could do; None where that isn't known."""
        peak = peak_flops(_device_name(self.world), self.settings.precision or "fp32")
        if peak is None:
            return None
        parameters = model.num_parameters(exclude_embeddings=True)
        return 6.0 * parameters * self.tokens / self.train_seconds / (peak * self.world.size)


def plain_cell(text: str) -> str:
    """A cell that a spreadsheet shows and doesn't run (OWASP, CSV injection): a quote before what begins a formula."""
    if text[:1] in ("=", "+", "-", "@", "\t", "\r"):
        try:
            float(text)
        except ValueError:
            return "'" + text
    return text


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense peak of the device in FLOP/s, from the vendor's data sheets; None for a device not listed: never a
    guess."""
    sheets = {"H200": (989e12, 67e12), "H100": (989e12, 67e12), "A100": (312e12, 19.5e12)}  # bf16, fp32
    for name, (bf16, fp32) in sheets.items():
        if name in device_name and "PCIe" not in device_name:
            return {"bf16": bf16, "fp32": fp32}.get(precision)
    return None


def git_commit() -> str | None:
    """The commit of the code that runs, with `+` where tracked files were changed since; None outside a checkout."""
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip()


def _device_name(world: World) -> str:
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    return f"cpu ({platform.machine()})"
