"""Whether two runs are bitwise identical, and if not, where they first differ."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ..common.errors import UserError
from ..runs.reader import Run
from ..runs.schema import MODEL, MODEL_FOLDER, probability_column

SPLIT_SETTINGS = ("seed", "test_size", "validation_size", "text_column", "label_column")
STEP_QUANTITIES = {"loss": "loss", "grad_norm": "gradient norm"}

Weights = dict[str, torch.Tensor]


def first_difference(a: Run, b: Run) -> str | None:
    """Return one line that names the first difference between two runs, or None if they are bitwise identical.

    Compared are, in this order: the loss and the gradient norm of each step, the number of steps, the predictions in
    file order, the weights in a's order, and the test metrics. 0.0 and -0.0 differ.

    Raises:
        UserError: the weights are missing, damaged or incomplete.
    """
    # Before anything is compared, so that damaged weights are reported even if the steps differ.
    weights_a, weights_b = (read_weights(run.folder / MODEL_FOLDER) for run in (a, b))
    return (
        _compare_steps(a, b)
        or _compare_predictions(a, b)
        or _compare_weights(weights_a, weights_b, a.folder, b=b.folder)
        or _compare_metrics(a, b)
    )


def check_same_rows(a: Run, b: Run) -> None:
    """Check that two runs were trained and tested on the same rows.

    Raises:
        UserError: the splits or the predicted rows differ.
    """
    if a.split["fingerprint"] != b.split["fingerprint"]:
        settings = [(name, a.settings.get(name), b.settings.get(name)) for name in SPLIT_SETTINGS]
        reasons = [f", --{name} {x} and {y}" for name, x, y in settings if x != y]
        if a.split.get("csv_sha256") != b.split.get("csv_sha256"):
            reasons.append(", other contents of the CSV")
        raise UserError(
            f"{a.folder} and {b.folder} have different splits ({a.split['fingerprint'][:16]} and "
            f"{b.split['fingerprint'][:16]}{''.join(reasons)}): train both on the same CSV with the same seed and sizes"
        )
    if list(a.predictions["row"]) != list(b.predictions["row"]):
        raise UserError(
            f"{a.folder} and {b.folder} have the same split, but their predictions are for different rows: one of them "
            "was changed"
        )


def bitwise_equal_numbers(x: float | None, y: float | None) -> bool:
    """Return whether two numbers have the same bits as float64, or both are missing."""
    if x is None or y is None:  # the gradient norm of a step that was skipped because of an overflow in fp16
        return x is y
    return struct.pack("<d", x) == struct.pack("<d", y)


def first_differing_step(a: Run, b: Run) -> tuple[int, str] | None:
    """Return step and key (of steps.jsonl) of the first loss or gradient norm that differs in the common steps."""
    for x, y in zip(a.steps, b.steps, strict=False):
        for key in STEP_QUANTITIES:
            if not bitwise_equal_numbers(x.get(key), y.get(key)):  # a gradient norm may be missing
                return x["step"], key
    return None


def _compare_steps(a: Run, b: Run) -> str | None:
    if (differing := first_differing_step(a, b)) is not None:
        step, key = differing
        x, y = (run.steps[step - 1].get(key) for run in (a, b))
        return f"step {step}: the {STEP_QUANTITIES[key]} is {x!r} in {a.folder} and {y!r} in {b.folder}"
    if len(a.steps) != len(b.steps):
        return f"number of steps: {len(a.steps)} in {a.folder} and {len(b.steps)} in {b.folder}"
    return None


def _compare_predictions(a: Run, b: Run) -> str | None:
    if a.split["classes"] != b.split["classes"] or list(a.predictions["row"]) != list(b.predictions["row"]):
        return f"predictions: {a.folder} and {b.folder} have different rows or classes"
    columns = {"review": "review", "label": "label", "predicted": "class"}
    columns |= {probability_column(name): f"probability of {name!r}" for name in a.split["classes"]}
    differs = np.column_stack([_unequal(a.predictions[name], b.predictions[name]) for name in columns])
    for i, j in np.argwhere(differs)[:1]:
        name = list(columns)[j]
        x, y = (run.predictions[name].tolist()[i] for run in (a, b))
        row = a.predictions["row"].iloc[i]
        return f"prediction for row {row}: the {columns[name]} is {x!r} in {a.folder} and {y!r} in {b.folder}"
    return None


def _unequal(x: Any, y: Any) -> NDArray[np.bool_]:
    """Compare two columns: numbers by their bits, text by its characters."""
    if x.dtype == np.float64:
        x, y = (np.ascontiguousarray(column).view(np.uint64) for column in (x, y))
    return np.asarray(x != y, dtype=bool)


def _compare_weights(weights_a: Weights, weights_b: Weights, a: Path, *, b: Path) -> str | None:
    for name in weights_a | weights_b:
        x, y = weights_a.get(name), weights_b.get(name)
        if x is None or y is None:
            return f"weights: tensor {name!r} is only in {a if y is None else b}"
        if x.dtype != y.dtype or x.shape != y.shape:
            types = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in (x, y)]
            return f"weights: tensor {name!r} is {types[0]} in {a} and {types[1]} in {b}"
        differs = (x.view(-1, 1).view(torch.uint8) != y.view(-1, 1).view(torch.uint8)).any(dim=1)
        if differs.any():
            return f"weights: {differs.sum()} of {x.numel()} values of tensor {name!r} differ between {a} and {b}"
    return None


def _compare_metrics(a: Run, b: Run) -> str | None:
    for name in ("accuracy", "f1", "loss"):
        x, y = (run.metrics[name] for run in (a, b))
        if not bitwise_equal_numbers(x, y):
            return f"test {name}: {x!r} in {a.folder} and {y!r} in {b.folder}"
    return None


def read_weights(folder: Path) -> Weights:
    """Map the tensors of model.safetensors, or of the files that model.safetensors.index.json names, into memory.

    Raises:
        UserError: a file is missing or damaged.
    """
    path = folder / "model.safetensors.index.json"
    names = {MODEL}
    weights: Weights = {}
    try:
        if path.exists():
            names = {Path(name).name for name in json.loads(path.read_text("utf-8"))["weight_map"].values()}
        for path in [folder / name for name in sorted(names)]:
            with safe_open(path, framework="pt") as file:
                weights |= {name: file.get_tensor(name) for name in file.offset_keys()}
    except FileNotFoundError:
        raise UserError(f"{path}: missing: the run has not finished, or its model was deleted") from None
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError, TypeError) as problem:
        raise UserError(f"{path}: damaged or incomplete: {problem}") from None
    if not weights:
        raise UserError(f"{folder}: its files contain no weights")
    return weights
