"""Whether two runs are bitwise identical, and if not, where they first differ."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ..common.errors import UserError
from ..runs.reader import Run
from ..runs.schema import MODEL, MODEL_FOLDER

SPLIT_SETTINGS = ("seed", "test_size", "validation_size", "text_column", "label_column")
STEP_QUANTITIES = {"loss": "loss", "grad_norm": "gradient norm"}


class Tensor(NamedTuple):
    """A stored tensor. `data` is a memory map of its bytes, uint8 (n_bytes,)."""

    dtype: str
    shape: list[int]
    data: NDArray[np.uint8]


Weights = dict[str, Tensor]


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
        settings = [(name, [run.settings.get(name) for run in (a, b)]) for name in SPLIT_SETTINGS]
        reasons = [f", --{name} {x} and {y}" for name, (x, y) in settings if x != y]
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
    """Return step and key (of steps.jsonl) of the first loss or gradient norm that differs.

    Returns:
        None if all steps that both runs have are identical.
    """
    for x, y in zip(a.steps, b.steps, strict=False):
        for key in STEP_QUANTITIES:
            if not bitwise_equal_numbers(x.get(key), y.get(key)):  # a gradient norm may be missing
                return x["step"], key
    return None


def _compare_steps(a: Run, b: Run) -> str | None:
    if (found := first_differing_step(a, b)) is not None:
        step, key = found
        x, y = (run.steps[step - 1].get(key) for run in (a, b))
        return f"step {step}: the {STEP_QUANTITIES[key]} is {x!r} in {a.folder} and {y!r} in {b.folder}"
    if len(a.steps) != len(b.steps):
        return f"number of steps: {len(a.steps)} in {a.folder} and {len(b.steps)} in {b.folder}"
    return None


def _compare_predictions(a: Run, b: Run) -> str | None:
    if a.split["classes"] != b.split["classes"] or list(a.predictions["row"]) != list(b.predictions["row"]):
        return f"predictions: {a.folder} and {b.folder} have different rows or classes"
    columns = {"review": "review", "label": "label", "class": "predicted"} | {
        f"probability of {name!r}": f"probability_{name}" for name in a.split["classes"]
    }
    differs = {quantity: _unequal(a.predictions[name], b.predictions[name]) for quantity, name in columns.items()}
    rows = np.logical_or.reduce(list(differs.values())).nonzero()[0]
    if not len(rows):
        return None
    first = rows[0]
    quantity = next(name for name, rows_differ in differs.items() if rows_differ[first])
    x, y = (run.predictions[columns[quantity]].tolist()[first] for run in (a, b))
    row = a.predictions["row"].iloc[first]
    return f"prediction for row {row}: the {quantity} is {x!r} in {a.folder} and {y!r} in {b.folder}"


def _unequal(x: Any, y: Any) -> NDArray[np.bool_]:
    """Compare two columns: numbers by their bits, text by its characters."""
    if x.dtype == np.float64:
        x, y = (np.ascontiguousarray(column).view(np.uint64) for column in (x, y))
    return np.asarray(x != y, dtype=bool)


def _compare_weights(weights_a: Weights, weights_b: Weights, a: Path, *, b: Path) -> str | None:
    for name in [*weights_a, *(name for name in weights_b if name not in weights_a)]:
        x, y = weights_a.get(name), weights_b.get(name)
        if x is None or y is None:
            return f"weights: tensor {name!r} is only in {a if y is None else b}"
        if x[:2] != y[:2]:
            return f"weights: tensor {name!r} is {x.dtype} {x.shape} in {a} and {y.dtype} {y.shape} in {b}"
        if not np.array_equal(x.data, y.data):
            size = math.prod(x.shape)
            differing = int((x.data != y.data).reshape(size, -1).any(axis=1).sum())
            return f"weights: {differing} of {size} values of tensor {name!r} differ between {a} and {b}"
    return None


def _compare_metrics(a: Run, b: Run) -> str | None:
    for name in ("accuracy", "f1", "loss"):
        x, y = (run.metrics[name] for run in (a, b))
        if not bitwise_equal_numbers(x, y):
            return f"test {name}: {x!r} in {a.folder} and {y!r} in {b.folder}"
    return None


def read_weights(folder: Path) -> Weights:
    """Map the tensors of model.safetensors, or of the files that model.safetensors.index.json names, into memory.

    As bytes, which works for every dtype (numpy has no bfloat16), for files of any size, and without torch.

    Raises:
        UserError: a file is missing or damaged.
    """
    index = folder / "model.safetensors.index.json"
    try:
        names = {MODEL}
        if index.exists():
            names = {Path(name).name for name in json.loads(index.read_text("utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as problem:
        raise UserError(f"{index}: damaged or incomplete: {problem}") from None
    weights = {name: tensor for file in sorted(names) for name, tensor in _read_tensors(folder / file).items()}
    if not weights:
        raise UserError(f"{folder}: its files contain no weights")
    return weights


def _read_tensors(path: Path) -> Weights:
    if not path.is_file():
        raise UserError(f"{path}: missing: the run has not finished, or its model was deleted")
    try:
        with safe_open(path, framework="np"):  # checks the header, the offsets and the length of the file
            pass
    except (SafetensorError, OSError) as problem:
        raise UserError(f"{path}: damaged or incomplete: {problem}") from None
    content = np.memmap(path, np.uint8, "r")
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8:start].tobytes())
    header.pop("__metadata__", None)
    return {
        name: Tensor(tensor["dtype"], tensor["shape"], content[start:][slice(*tensor["data_offsets"])])
        for name, tensor in header.items()
    }
