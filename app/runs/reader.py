"""Read a finished run. Its files are untrusted: everything is checked before it is used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..common.errors import UserError
from .csv_escape import escape, unescape
from .parse import parse_object
from .schema import (
    EVALUATIONS,
    METRICS,
    PREDICTIONS,
    SETTINGS,
    SPLIT,
    STEPS,
    JsonFormat,
    prediction_columns,
    probability_column,
)


@dataclass(frozen=True)
class Run:
    """A finished run, read from its files alone.

    Attributes:
        steps: the lines of steps.jsonl, in order.
        predictions: one row per test row in file order: `row` (int64), `label`, `predicted` (str),
            `probability_<class>` (float64), `review` (str). The texts are the original ones, without the escapes of
            predictions.csv.
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
        """The training path: `ddp_loop` or `trainer_run`."""
        return str(self.settings["path"])

    @property
    def probabilities(self) -> pd.DataFrame:
        """The predicted probabilities, float64 (n_test, classes), in the order of the classes."""
        return self.predictions[[probability_column(name) for name in self.split["classes"]]]

    def class_ids(self, column: str) -> NDArray[np.int64]:
        """Return `label` or `predicted` as indices into the list of classes, int64 (n_test,).

        Raises:
            UserError: split.json does not list a class.
        """
        ids = {name: index for index, name in enumerate(self.split["classes"])}
        try:
            return np.array([ids[name] for name in self.predictions[column]], dtype=np.int64)
        except KeyError as unknown:
            path = self.folder / PREDICTIONS
            raise UserError(f"{path}: {column} {unknown} is not a class in {SPLIT.name}") from None


def read_run(folder: Path) -> Run:
    """Read the run in a folder.

    Raises:
        UserError: there is no such folder, a file is missing, damaged or incomplete, or files contradict one another.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run folder")
    settings, split, metrics = (read_object(folder, file) for file in (SETTINGS, SPLIT, METRICS))
    run = Run(
        folder,
        settings,
        split,
        _read_lines(folder, STEPS),
        _read_lines(folder, EVALUATIONS) if (folder / EVALUATIONS.name).exists() else [],
        metrics,
        _read_predictions(folder / PREDICTIONS, split["classes"], is_escaped="csv_escape" in split),
    )
    _check(run)
    return run


def _check(run: Run) -> None:
    if [step["step"] for step in run.steps] != list(range(1, len(run.steps) + 1)):
        raise UserError(f"{run.folder / STEPS.name}: steps are missing or repeated: it must count 1, 2, 3, …")
    path, predictions, n_test = run.folder / PREDICTIONS, run.predictions, run.metrics["n_test"]
    if run.split["n_test"] != n_test:
        raise UserError(f"{run.folder / SPLIT.name}: n_test is {run.split['n_test']}, but {n_test} in {METRICS.name}")
    if not 0 < len(predictions) == n_test or predictions["row"].duplicated().any():
        raise UserError(f"{path}: must hold each of {n_test} test rows once")
    run.class_ids("label")
    probabilities, predicted = run.probabilities.to_numpy(), run.class_ids("predicted")
    for i in np.flatnonzero(probabilities[np.arange(n_test), predicted] != probabilities.max(axis=1))[:1]:
        row = predictions["row"].iloc[i]
        raise UserError(f"{path}: row {row}: predicted is not the most probable class")
    accuracy = float((predictions["label"] == predictions["predicted"]).mean())
    if abs(accuracy - run.metrics["accuracy"]) > 1e-9:
        raise UserError(
            f"{path}: its accuracy is {accuracy:.6f}, but {run.metrics['accuracy']:.6f} in {METRICS.name}: the files "
            "are not from the same run"
        )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: missing: the run has not finished, or this is not a run folder") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"{path}: cannot be read: {problem}") from None


def read_object(folder: Path, file: JsonFormat) -> dict[str, Any]:
    """Return the content of a JSON file of a run.

    Raises:
        UserError: it is missing, cannot be read, or does not have this format.
    """
    path = folder / file.name
    return parse_object(_read_text(path), str(path), file)


def _read_lines(folder: Path, file: JsonFormat) -> list[dict[str, Any]]:
    path = folder / file.name
    text = _read_text(path)
    if not text.endswith("\n"):
        raise UserError(f"{path}: is empty or ends in the middle of a line")
    return [
        parse_object(line, f"{path}, line {number}", file) for number, line in enumerate(text.splitlines(), start=1)
    ]


def _read_predictions(path: Path, classes: list[str], is_escaped: bool) -> pd.DataFrame:
    """Read predictions.csv. The first version escaped less: a `'` before a class that begins like a formula."""
    _read_text(path)
    columns, numbers = prediction_columns(classes), [probability_column(name) for name in classes]
    headers = {escape(name) if is_escaped else name: name for name in columns}
    dtypes = {header: "int64" if name == "row" else "str" for header, name in headers.items()}
    try:
        predictions: pd.DataFrame = pd.read_csv(path, dtype=dtypes, keep_default_na=False).rename(columns=headers)
        for name in numbers:  # with Python's float, which reads back exactly what `repr` has written
            if name in predictions:
                predictions[name] = [float(number) for number in predictions[name]]
    except (ValueError, OverflowError, pd.errors.ParserError, pd.errors.EmptyDataError) as problem:
        raise UserError(f"{path}: damaged or incomplete: {' '.join(str(problem).split())}") from None
    missing = [name for name in columns if name not in predictions.columns]
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
