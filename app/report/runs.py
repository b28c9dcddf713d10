"""Reads what a run left behind, and trusts none of it until it has been checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from app.errors import UserError

STEP_KEYS = ("step", "epoch", "loss", "grad_norm", "learning_rate", "examples", "tokens", "padded_tokens", "seconds")
SETTINGS_KEYS = ("path", "world_size", "csv", "seed")
SPLIT_KEYS = ("fingerprint", "n_test", "classes")
METRICS_KEYS = ("accuracy", "f1", "loss", "n_test", "train_seconds", "train_examples_per_second", "peak_memory_bytes")
NUMBERS = {*STEP_KEYS, *METRICS_KEYS, "world_size", "seed"} - {"peak_memory_bytes"}


@dataclass(frozen=True)
class Run:
    """A finished run, from its files alone.

    `predictions` has a row a test row in file order: `row` (int64), `label`, `predicted` (str), `probability_<class>`
    (float64), `review` (str). `steps` are the lines of steps.jsonl, in order.
    """

    folder: Path
    settings: dict[str, Any]
    split: dict[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    metrics: dict[str, Any]
    predictions: pd.DataFrame

    @property
    def path(self) -> str:
        """The road it took: `ddp_loop` or `trainer_run`."""
        return str(self.settings["path"])

    @property
    def probabilities(self) -> pd.DataFrame:
        """float64 (n_test, classes), in the order of the classes."""
        return self.predictions[[f"probability_{name}" for name in self.split["classes"]]]


def read_run(folder: Path) -> Run:
    """The run in a folder.

    Raises:
        UserError: no such folder, a file missing, damaged or half-written, or files that contradict one another.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run folder")
    settings = _read_object(folder / "settings.json", SETTINGS_KEYS)
    split = _read_object(folder / "split.json", SPLIT_KEYS)
    metrics = _read_object(folder / "metrics.json", METRICS_KEYS)
    steps = _read_lines(folder / "steps.jsonl", STEP_KEYS)
    evaluations = folder / "evaluations.jsonl"
    run = Run(
        folder,
        settings,
        split,
        steps,
        _read_lines(evaluations, ("step", "epoch", "rows", "accuracy", "loss")) if evaluations.exists() else [],
        metrics,
        _read_predictions(folder / "predictions.csv", split["classes"]),
    )
    _check(run)
    return run


def _check(run: Run) -> None:
    numbers = [step["step"] for step in run.steps]
    if numbers != list(range(1, len(numbers) + 1)):
        raise UserError(f"{run.folder / 'steps.jsonl'}: steps are missing or repeated: it must count 1, 2, 3, …")
    predictions = run.predictions
    if len(predictions) != run.metrics["n_test"] or predictions["row"].duplicated().any():
        raise UserError(f"{run.folder / 'predictions.csv'}: must hold each of {run.metrics['n_test']} test rows once")
    accuracy = float((predictions["label"] == predictions["predicted"]).mean())
    if abs(accuracy - run.metrics["accuracy"]) > 1e-9:
        raise UserError(
            f"{run.folder / 'predictions.csv'}: its accuracy is {accuracy:.6f}, metrics.json says "
            f"{run.metrics['accuracy']:.6f}: the files are not of one run"
        )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: missing: the run has not finished, or this is no run folder") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"{path}: can't be read: {problem}") from None


def _read_object(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    return _parse(_read_text(path), keys, str(path))


def _read_lines(path: Path, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    text = _read_text(path)
    if not text.endswith("\n"):
        raise UserError(f"{path}: is empty or ends in the middle of a line")
    return [_parse(line, keys, f"{path}, line {number}") for number, line in enumerate(text.splitlines(), start=1)]


def _parse(text: str, keys: tuple[str, ...], place: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as problem:
        raise UserError(f"{place}: damaged or half-written: {problem}") from None
    missing = [key for key in keys if not isinstance(content, dict) or key not in content]
    if missing:
        raise UserError(f"{place}: lacks {', '.join(missing)}")
    for key in NUMBERS.intersection(keys):
        if not isinstance(content[key], int | float) or isinstance(content[key], bool):
            raise UserError(f"{place}: {key} is {content[key]!r}, not a number")
    return dict(content)


def _read_predictions(path: Path, classes: list[str]) -> pd.DataFrame:
    _read_text(path)
    numbers = [f"probability_{name}" for name in classes]
    texts = ["label", "predicted", "review", *numbers]
    try:
        predictions: pd.DataFrame = pd.read_csv(
            path, dtype=dict.fromkeys(texts, str) | {"row": "int64"}, keep_default_na=False
        )
        for name in numbers:  # by Python, which reads back what `repr` has written, to the bit
            if name in predictions:
                predictions[name] = [float(number) for number in predictions[name]]
    except (ValueError, pd.errors.ParserError, pd.errors.EmptyDataError) as problem:
        raise UserError(f"{path}: damaged or half-written: {' '.join(str(problem).split())}") from None
    missing = [name for name in ["row", *texts] if name not in predictions.columns]
    if missing:
        raise UserError(f"{path}: lacks the column(s) {', '.join(missing)}")
    return predictions
