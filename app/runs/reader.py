"""Read a finished run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from ..common.errors import UserError
from .csv_escape import escape
from .schema import EVALUATIONS, METRICS, PREDICTIONS, SETTINGS, SPLIT, STEPS, prediction_columns, probability_column

T = TypeVar("T")
SCORES = ("accuracy", "f1", "loss", "train_seconds", "train_examples_per_second")  # of metrics.json


@dataclass(frozen=True)
class Run:
    """A finished run, read from its files alone.

    Attributes:
        predictions: one row per test row in file order: `row` (int64), `label`, `predicted` (str),
            `probability_<class>` (float64), `review` (str, with the escapes of the file).
    """

    folder: Path
    settings: dict[str, Any]
    split: dict[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    metrics: dict[str, Any]
    predictions: pd.DataFrame

    @property
    def probabilities(self) -> pd.DataFrame:
        """The predicted probabilities, float64 (n_test, classes), in the order of the classes."""
        return self.predictions[[probability_column(name) for name in self.split["classes"]]]


def read_run(folder: Path) -> Run:
    """Read the run in a folder. Raises UserError, which names the file, if one is missing or damaged."""
    settings = read_object(folder, SETTINGS, path=str, world_size=int)
    split = read_object(folder, SPLIT, classes=list, fingerprint=str)
    metrics = read_object(folder, METRICS, n_test=int, **dict.fromkeys(SCORES, float | int))
    steps = _read(folder / STEPS, lambda path: _lines(path, step=int, loss=float | int))
    evaluations = _read(folder / EVALUATIONS, _lines) if (folder / EVALUATIONS).exists() else []
    predictions = _read(folder / PREDICTIONS, lambda path: _predictions(path, split["classes"], metrics["n_test"]))
    return Run(folder, settings, split, steps, evaluations, metrics, predictions)


def read_object(folder: Path, file: Path, **kinds: Any) -> dict[str, Any]:
    """Return the content of a JSON file of a run. Raises UserError if it is missing, or lacks a key of these types."""
    return _read(folder / file, lambda path: _object(path.read_text(encoding="utf-8"), kinds))


def _read(path: Path, parse: Callable[[Path], T]) -> T:
    """Turn the errors of a function that reads a file into one line that names it."""
    try:
        return parse(path)
    except FileNotFoundError:
        raise UserError(f"{path}: missing: the run has not finished, or this is not a run folder") from None
    except (OSError, ValueError, KeyError, TypeError) as problem:
        text = " ".join(f"{type(problem).__name__}: {problem}".split())
        raise UserError(f"{path}: damaged or incomplete, or of another version: {text}") from None


def _object(text: str, kinds: dict[str, Any]) -> dict[str, Any]:
    content = dict(json.loads(text))
    for name, kind in kinds.items():
        if not isinstance(content[name], kind):
            raise TypeError(f"{name} is {content[name]!r}")
    return content


def _lines(path: Path, **kinds: Any) -> list[dict[str, Any]]:
    return [_object(line, kinds) for line in path.read_text(encoding="utf-8").splitlines()]


def _predictions(path: Path, classes: list[str], n: int) -> pd.DataFrame:
    columns = prediction_columns(classes)
    originals = {escape(name): name for name in [*columns, *classes]}
    cells = pd.read_csv(path, dtype="str", keep_default_na=False).rename(columns=originals)[columns]
    if len(cells) != n:
        raise ValueError(f"{len(cells)} rows, not the {n} of {METRICS}")
    cells[["label", "predicted"]] = cells[["label", "predicted"]].map(originals.__getitem__)
    return cells.astype({"row": "int64"} | dict.fromkeys(map(probability_column, classes), "float64"))
