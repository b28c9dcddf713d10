"""Read a finished run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..common.errors import UserError
from .csv_escape import escape, unescape
from .schema import EVALUATIONS, METRICS, PREDICTIONS, SETTINGS, SPLIT, STEPS, prediction_columns, probability_column

# The keys that every version has written.
REQUIRED = {
    SETTINGS: ("path", "world_size", "csv", "seed"),
    SPLIT: ("fingerprint", "n_test", "classes"),
    METRICS: ("accuracy", "f1", "loss", "n_test", "train_seconds", "train_examples_per_second", "peak_memory_bytes"),
}


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
        UserError: there is no such folder, a file is missing or damaged, or files contradict one another.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run folder")
    settings, split, metrics = (read_object(folder, file) for file in (SETTINGS, SPLIT, METRICS))
    evaluations = _read_lines(folder / EVALUATIONS) if (folder / EVALUATIONS).exists() else []
    steps, path = _read_lines(folder / STEPS), folder / PREDICTIONS
    with one_line_errors(path):
        predictions = _read_predictions(path, split["classes"], is_escaped="csv_escape" in split)
        run = Run(folder, settings, split, steps, evaluations, metrics, predictions)
        accuracy = float((predictions["label"] == predictions["predicted"]).mean())
        is_complete = len(predictions) == metrics["n_test"] > 0 and not predictions["row"].duplicated().any()
        if not is_complete or not abs(accuracy - metrics["accuracy"]) <= 1e-9:
            raise UserError(f"{path}: is not from the same run as {METRICS.name}, or damaged")
        for column in ("label", "predicted"):
            run.class_ids(column)  # raises if split.json does not list a class
        if [step["step"] for step in steps] != list(range(1, len(steps) + 1)):
            raise UserError(f"{folder / STEPS}: steps are missing or repeated: it must count 1, 2, 3, …")
    return run


@contextmanager
def one_line_errors(path: Path) -> Iterator[None]:
    """Turn the errors of code that reads a file into one line that names it."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path}: missing: the run has not finished, or this is not a run folder") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as problem:
        text = " ".join(f"{type(problem).__name__}: {problem}".split())
        raise UserError(f"{path}: damaged or incomplete, or of another version: {text}") from None


def read_object(folder: Path, file: Path) -> dict[str, Any]:
    """Return the content of a JSON file of a run.

    Raises:
        UserError: it is missing, or cannot be read.
    """
    with one_line_errors(folder / file):
        content = dict(json.loads((folder / file).read_text(encoding="utf-8")))
        if missing := [key for key in REQUIRED[file] if content.get(key) is None]:
            raise UserError(f"{folder / file}: lacks {', '.join(missing)}")
        return content


def _read_lines(path: Path) -> list[dict[str, Any]]:
    with one_line_errors(path):
        return [dict(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _read_predictions(path: Path, classes: list[str], is_escaped: bool) -> pd.DataFrame:
    """Read predictions.csv. The first version escaped less: a `'` before a class that begins like a formula."""
    columns, numbers = prediction_columns(classes), [probability_column(name) for name in classes]
    headers = {escape(name) if is_escaped else name: name for name in columns}
    dtypes = {header: "int64" if name == "row" else "str" for header, name in headers.items()}
    predictions: pd.DataFrame = pd.read_csv(path, dtype=dtypes, keep_default_na=False).rename(columns=headers)[columns]
    if not isinstance(predictions.index, pd.RangeIndex):
        raise ValueError("its rows have more fields than its header")
    for name in numbers:  # with Python's float, which reads back exactly what `repr` has written
        predictions[name] = [float(number) for number in predictions[name]]
    if is_escaped:
        for name in ("label", "predicted", "review"):
            predictions[name] = predictions[name].map(unescape)
    else:
        originals = {"'" + name: name for name in classes} | {name: name for name in classes}
        for name in ("label", "predicted"):
            predictions[name] = [originals.get(cell, cell) for cell in predictions[name]]
    return predictions
