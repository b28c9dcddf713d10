"""Reads what a run left behind, and trusts none of it until it has been checked."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from app.errors import UserError
from app.runs.cells import escape, unescape

# What a value must be. Whatever else a file holds is only shown.
NUMBER, WHOLE, TEXT, NUMBERS, TEXTS = "a number", "a whole number", "a text", "a list of numbers", "a list of texts"
Kinds = Mapping[str, str]
STEP = {"step": WHOLE} | dict.fromkeys(
    ("epoch", "loss", "grad_norm", "learning_rate", "examples", "tokens", "padded_tokens", "seconds"), NUMBER
)
EVALUATION = {"step": WHOLE, "epoch": NUMBER, "rows": TEXT, "accuracy": NUMBER, "loss": NUMBER}
SETTINGS = {"path": TEXT, "world_size": WHOLE, "csv": TEXT, "seed": WHOLE}
SETTINGS_IF_THERE = dict.fromkeys(("cache_dir", "text_column", "label_column"), TEXT)
SETTINGS_IF_THERE |= dict.fromkeys(("test_size", "validation_size"), NUMBER)
SPLIT = {"fingerprint": TEXT, "n_test": WHOLE, "classes": TEXTS}
METRICS = {"n_test": WHOLE, "peak_memory_bytes": NUMBERS} | dict.fromkeys(
    ("accuracy", "f1", "loss", "train_seconds", "train_examples_per_second"), NUMBER
)
METRICS_IF_KNOWN = dict.fromkeys(("precision", "recall", "train_tokens_per_second", "padding_fraction", "mfu"), NUMBER)


@dataclass(frozen=True)
class Run:
    """A finished run, from its files alone.

    `predictions` has a row a test row in file order: `row` (int64), `label`, `predicted` (str), `probability_<class>`
    (float64), `review` (str): the original texts, without what predictions.csv escapes. `steps` are the lines of
    steps.jsonl, in order.
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

    def class_ids(self, column: str) -> NDArray[np.int64]:
        """`label` or `predicted` as positions in the list of classes, int64 (n_test,).

        Raises:
            UserError: a class that the split doesn't know.
        """
        ids = {name: position for position, name in enumerate(self.split["classes"])}
        try:
            return np.array([ids[name] for name in self.predictions[column]], dtype=np.int64)
        except KeyError as unknown:
            path = self.folder / "predictions.csv"
            raise UserError(f"{path}: {column} {unknown} is no class of split.json") from None


def read_run(folder: Path) -> Run:
    """The run in a folder.

    Raises:
        UserError: no such folder, a file missing, damaged or half-written, or files that contradict one another.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run folder")
    settings = _read_object(folder / "settings.json", SETTINGS, SETTINGS_IF_THERE)
    split = _read_object(folder / "split.json", SPLIT, {"csv": TEXT})
    metrics = _read_object(folder / "metrics.json", METRICS, METRICS_IF_KNOWN)
    steps = _read_lines(folder / "steps.jsonl", STEP)
    evaluations = folder / "evaluations.jsonl"
    run = Run(
        folder,
        settings,
        split,
        steps,
        _read_lines(evaluations, EVALUATION) if evaluations.exists() else [],
        metrics,
        _read_predictions(folder / "predictions.csv", split["classes"], is_escaped="csv_escape" in split),
    )
    _check(run)
    return run


def _check(run: Run) -> None:
    numbers = [step["step"] for step in run.steps]
    if numbers != list(range(1, len(numbers) + 1)):
        raise UserError(f"{run.folder / 'steps.jsonl'}: steps are missing or repeated: it must count 1, 2, 3, …")
    predictions, n_test = run.predictions, run.metrics["n_test"]
    if run.split["n_test"] != n_test:
        raise UserError(f"{run.folder / 'split.json'}: n_test is {run.split['n_test']}, metrics.json says {n_test}")
    if not 0 < len(predictions) == n_test or predictions["row"].duplicated().any():
        raise UserError(f"{run.folder / 'predictions.csv'}: must hold each of {n_test} test rows once")
    run.class_ids("label")
    chances, predicted = run.probabilities.to_numpy(), run.class_ids("predicted")
    for i in np.flatnonzero(chances[np.arange(n_test), predicted] != chances.max(axis=1))[:1]:
        row = predictions["row"].iloc[i]
        raise UserError(f"{run.folder / 'predictions.csv'}: row {row}: predicted is not the most probable class")
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


def _read_object(path: Path, needed: Kinds, if_there: Kinds) -> dict[str, Any]:
    return _parse(_read_text(path), str(path), needed, if_there)


def _read_lines(path: Path, needed: Kinds) -> list[dict[str, Any]]:
    text = _read_text(path)
    if not text.endswith("\n"):
        raise UserError(f"{path}: is empty or ends in the middle of a line")
    return [_parse(line, f"{path}, line {number}", needed) for number, line in enumerate(text.splitlines(), start=1)]


def _parse(text: str, place: str, needed: Kinds, if_there: Kinds | None = None) -> dict[str, Any]:
    try:
        content = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as problem:
        raise UserError(f"{place}: damaged or half-written: {problem}") from None
    missing = [key for key in needed if not isinstance(content, dict) or key not in content]
    if missing:
        raise UserError(f"{place}: lacks {', '.join(missing)}")
    there = {key: kind for key, kind in (if_there or {}).items() if content.get(key) is not None}
    for key, kind in {**needed, **there}.items():
        if not _is(content[key], kind):
            raise UserError(f"{place}: {key} is {str(content[key])[:80]!r}, not {kind}")
    return dict(content)


def _finite(text: str) -> float:
    value = float(text)
    if not abs(value) <= sys.float_info.max:
        raise ValueError(f"{text} is no finite number")
    return value


def _is(value: Any, kind: str) -> bool:
    if kind == TEXTS:  # names, so each one once
        return isinstance(value, list) and all(_is(x, TEXT) for x in value) and len(set(value)) == len(value) > 0
    if kind == NUMBERS:
        return isinstance(value, list) and all(_is(x, NUMBER) for x in value) and len(value) > 0
    if kind == TEXT:
        return isinstance(value, str)
    is_number = isinstance(value, int if kind == WHOLE else int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max  # JSON's whole numbers have no end


def _read_predictions(path: Path, classes: list[str], is_escaped: bool) -> pd.DataFrame:
    """Read predictions.csv. The first version escaped less, by a `'` before a class that begins like a formula."""
    _read_text(path)
    numbers = [f"probability_{name}" for name in classes]
    texts = ["label", "predicted", "review", *numbers]
    headers = {escape(name) if is_escaped else name: name for name in texts}
    try:
        predictions: pd.DataFrame = pd.read_csv(
            path, dtype=dict.fromkeys(headers, str) | {"row": "int64"}, keep_default_na=False
        ).rename(columns=headers)
        for name in numbers:  # by Python, which reads back what `repr` has written, to the bit
            if name in predictions:
                predictions[name] = [float(number) for number in predictions[name]]
    except (ValueError, OverflowError, pd.errors.ParserError, pd.errors.EmptyDataError) as problem:
        raise UserError(f"{path}: damaged or half-written: {' '.join(str(problem).split())}") from None
    missing = [name for name in ["row", *texts] if name not in predictions.columns]
    if missing:
        raise UserError(f"{path}: lacks the column(s) {', '.join(missing)}")
    if not isinstance(predictions.index, pd.RangeIndex):
        raise UserError(f"{path}: damaged: its rows have more fields than its header")
    if is_escaped:
        for name in ("label", "predicted", "review"):
            predictions[name] = predictions[name].map(unescape)
    else:
        originals = {"'" + name: name for name in classes} | {name: name for name in classes}
        for name in ("label", "predicted"):
            predictions[name] = [originals.get(cell, cell) for cell in predictions[name]]
    return predictions
